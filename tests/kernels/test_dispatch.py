"""The public functions on a GPU, or as if on one: they take the Triton kernels, and give what their references give."""

import pytest
import torch

from exegpt.kernels import gpu_device
from exegpt.kernels.argmax import argmax
from exegpt.kernels.attention import attention, attention_reference
from exegpt.kernels.kv_blocks import gather_blocks, scatter_blocks
from exegpt.kernels.kv_layout import keys_like_values
from exegpt.kernels.kv_write import kv_write, kv_write_reference
from exegpt.kernels.norm import layer_norm, layer_norm_reference, rms_norm, rms_norm_reference
from exegpt.kernels.rotary import rotate, rotate_and_write, rotate_and_write_reference, rotate_reference
from exegpt.kernels.sampling import sample, sample_reference
from exegpt.kernels.swiglu import geglu, geglu_reference, swiglu, swiglu_reference

from .gpu import DEVICE, cache_there, needs_triton, there
from .test_attention import paged
from .test_kv_blocks import a_cache
from .test_rows import new_tokens
from .test_sampling import edited, mixed, over_there

pytestmark = needs_triton


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch):
    """Where there is no GPU, the CPU's tensors count as a GPU's, and the kernels are interpreted."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(gpu_device, "on_gpu", lambda x: True)


def assert_close(got, expected):
    torch.testing.assert_close(got.cpu(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("news", "contexts"), [((1, 1), (5, 700)), ((40, 3), (40, 90))])
def test_attention(news, contexts):
    q, _, cache = paged(news, contexts, 8, 2, 64, 16)
    assert_close(attention(there(q), *cache_there(*cache), window=30), attention_reference(q, *cache, window=30))


def test_rows():
    x, w, b, r = (torch.randn(*shape) for shape in ((5, 64), (64,), (64,), (5, 64)))
    gpu_r = there(r.clone())
    assert_close(rms_norm(*there(x, w), 1e-5), rms_norm_reference(x, w, 1e-5))
    assert_close(layer_norm(*there(x, w, b), 1e-5, gpu_r), layer_norm_reference(x, w, b, 1e-5, r))
    assert_close(gpu_r, r)
    assert_close(swiglu(there(x)), swiglu_reference(x))
    assert_close(geglu(there(x)), geglu_reference(x))
    assert argmax(there(x)).tolist() == x.argmax(-1).tolist()


def test_new_tokens():
    qkv, where, slots, cache = new_tokens(7, 3, 2, 80, 16)
    mine, my_cache = there(qkv.clone()), cache_there(*(t.clone() for t in cache))
    rotate_and_write(mine[:, :3], mine[:, 3:5], mine[:, 5:], *there(*where), *my_cache, there(slots))
    rotate_and_write_reference(qkv[:, :3], qkv[:, 3:5], qkv[:, 5:], *where, *cache, slots)
    assert_close(mine[:, :3], qkv[:, :3])
    kv_write(*there(qkv[:, :2], qkv[:, 2:4]), *my_cache, there(slots))
    kv_write_reference(qkv[:, :2], qkv[:, 2:4], *cache, slots)
    for got, expected in zip(my_cache, (keys_like_values(cache[0]), cache[1]), strict=True):
        assert_close(got, expected)
    mine = there(qkv.clone())
    rotate(mine, *there(*where))
    rotate_reference(qkv, *where)
    assert_close(mine, qkv)


def test_blocks():
    cache = a_cache(4, 9, 2, 80, 16)
    mine, sources, targets = there([t.clone() for t in cache]), torch.tensor([7, 2]), torch.tensor([0, 3])
    buffer = there(torch.zeros(4, 2, cache[0][0].numel()))
    gather_blocks(mine, there(sources), buffer)
    scatter_blocks(buffer, mine, there(targets))
    for tensor in cache:
        tensor[targets] = tensor[sources]
    for got, expected in zip(mine, cache, strict=True):
        assert torch.equal(got.cpu(), expected)


def test_sampling():
    logits, how = mixed(12, 1000)
    assert sample(there(logits), over_there(how)).tolist() == sample_reference(logits, how).tolist()
    logits, how = edited(12, 1000)
    assert sample(there(logits), over_there(how)).tolist() == sample_reference(logits, how).tolist()
