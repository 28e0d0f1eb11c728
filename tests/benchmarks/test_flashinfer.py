"""FlashInfer as a peer: what it is asked, by a stand-in over odd shapes, and by its signatures where it is there."""

import inspect
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.kernels import flashinfer_attention
from benchmarks.kernels.check import compare
from benchmarks.kernels.flashinfer_attention import pages
from exegpt.kernels import device
from exegpt.kernels.attention import attention_reference
from exegpt.kernels.kv_layout import keys_like_values

from ..kernels.test_attention import paged
from . import flashinfer_stand_in

NOT_THERE = "FlashInfer is not installed: pip install flashinfer-python."


@pytest.fixture
def stand_in(monkeypatch):
    """FlashInfer's place is taken; the CPU's tensors are a GPU's, for any head size."""
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer_stand_in)
    monkeypatch.setattr(device, "on_gpu", lambda x: True)
    monkeypatch.setattr(flashinfer_attention, "HEAD_SIZES", range(1, 257))
    monkeypatch.setattr(flashinfer_attention, "_WORKSPACE_BYTES", 128 * 2**20)
    flashinfer_stand_in.CALLS.clear()
    return flashinfer_stand_in


def both(sizes, heads, kv_heads, head_size, block_size, dtype=torch.float32, **options):
    """FlashInfer's result and the reference's for sequences of (new tokens, context)."""
    news, contexts = zip(*sizes, strict=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "on_gpu", lambda x: False)  # the cache is filled by the CPU's kernel
        q, _, (keys, *others) = paged(news, contexts, heads, kv_heads, head_size, block_size, dtype=dtype)
        keys = keys_like_values(keys).contiguous()
    (made,) = flashinfer_attention.peer(q, keys, *others, **options).values()
    made()
    return made(), attention_reference(q.float(), keys, *others, **options)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "block_size"), [(8, 2, 64, 16), (3, 3, 80, 16), (20, 1, 24, 8), (4, 2, 12, 3)]
)
@pytest.mark.parametrize(
    "sizes", [((1, 1), (1, 16), (1, 37)), ((5, 5), (1, 1), (33, 33)), ((7, 40), (1, 18), (20, 36)), ((1, 1),)]
)
@pytest.mark.parametrize("options", [{}, {"window": 1}, {"window": 21, "scale": 0.3}, {"causal": False}], ids=str)
def test_it_is_asked_for_the_same_attention(stand_in, sizes, heads, kv_heads, head_size, block_size, options):
    got, want = both(sizes, heads, kv_heads, head_size, block_size, **options)
    torch.testing.assert_close(got, want, atol=5e-6, rtol=1e-5)
    assert [method for _, method, _, _ in stand_in.CALLS] == ["__init__", "plan", "run", "run"]  # planned once


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=6), min_size=1, max_size=5), st.data())
def test_pages_are_each_sequences_blocks_in_order(blocks, data):
    block_size = data.draw(st.integers(1, 16))
    last = [data.draw(st.integers(1, block_size)) for _ in blocks]
    tables = torch.full((len(blocks), 7), -1, dtype=torch.int32)  # behind a sequence's own lies anything
    for i, own in enumerate(blocks):
        tables[i, : len(own)] = torch.tensor(own)
    lengths = [(len(own) - 1) * block_size + rest for own, rest in zip(blocks, last, strict=True)]
    made = pages(tables, torch.tensor(lengths, dtype=torch.int32), block_size)
    assert [made.indices[a:b].tolist() for a, b in zip(made.indptr, made.indptr[1:], strict=False)] == blocks
    assert made.last_page_len.tolist() == last and made.indptr[-1] == len(made.indices)
    assert {array.dtype for array in made} == {torch.int32}


def test_what_it_lacks_is_said_at_the_first_call(stand_in, monkeypatch):
    monkeypatch.setattr(flashinfer_attention, "HEAD_SIZES", frozenset((64,)))
    with pytest.raises(ValueError, match="no heads of 80"):
        both(((1, 5),), 4, 2, 80, 16)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ModuleNotFoundError, match="flashinfer"):
        both(((1, 5),), 4, 2, 64, 16)


def test_it_is_no_peer_for_a_bias_nor_on_the_cpu(stand_in, monkeypatch):
    q = torch.zeros(1, 2, 64)
    arrays = (q, q, q, q, q, q)
    assert flashinfer_attention.peer(*arrays) and not flashinfer_attention.peer(*arrays, bias=torch.zeros(2, 3))
    monkeypatch.setattr(device, "on_gpu", lambda x: False)
    assert not flashinfer_attention.peer(*arrays)


def test_calls_bind_to_its_own_signatures(stand_in, monkeypatch):
    for sizes in ([(1, 5), (1, 20)], [(3, 5), (1, 20)]):
        both(sizes, 8, 2, 64, 16, window=4)
    assert len({name for name, *_ in stand_in.CALLS}) == 2
    monkeypatch.undo()
    real = pytest.importorskip("flashinfer", reason=NOT_THERE, exc_type=ImportError)
    for name, method, count, names in stand_in.CALLS:
        wrapper = getattr(real, name)
        bound = inspect.signature(getattr(wrapper, method)).bind(None, *range(count), **dict.fromkeys(names))
        assert "deprecated_positional_args" not in bound.arguments
        if unnamed := bound.arguments.get("kwargs"):  # plan hands them on
            assert set(unnamed) <= set(inspect.signature(wrapper._plan_impl).parameters)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", [((1, 1), (1, 16), (1, 1037)), ((5, 5), (1, 1), (133, 133)), ((7, 400), (1, 18))])
@pytest.mark.parametrize("options", [{}, {"window": 21}], ids=str)
def test_it_is_right_on_a_gpu(dtype, sizes, options):
    pytest.importorskip("flashinfer", reason=NOT_THERE, exc_type=ImportError)
    news, contexts = zip(*sizes, strict=True)
    q, _, (keys, *others) = paged(news, contexts, 8, 2, 128, 16, dtype=dtype)
    q, keys, *others = (t.cuda() for t in (q, keys_like_values(keys).contiguous(), *others))
    (made,) = flashinfer_attention.peer(q, keys, *others, **options).values()
    assert compare(made(), attention_reference(q.float(), keys, *others, **options), dtype).passed
