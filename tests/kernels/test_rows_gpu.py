"""The Triton kernels that treat every row alone, against their plain references; and what is new on the processor."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exegpt.kernels.kv_write import kv_write_reference
from exegpt.kernels.norm import layer_norm, layer_norm_reference, rms_norm, rms_norm_reference
from exegpt.kernels.norm_gpu import norm_gpu
from exegpt.kernels.rotary import rotate_and_write, rotate_and_write_reference, rotate_reference
from exegpt.kernels.rotary_gpu import kv_write_gpu, rotate_and_write_gpu, rotate_gpu
from exegpt.kernels.swiglu import BEND, SLOPE, geglu, geglu_reference, swiglu_reference
from exegpt.kernels.swiglu_gpu import gated_gpu

from .gpu import needs_triton, there

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CLOSE = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def assert_close(got, want):
    error = CLOSE[want.dtype]
    torch.testing.assert_close(got.cpu(), want, atol=error, rtol=error)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 77), (2, 513)])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@needs_triton
def test_norms(dtype, rows, width, residual, bias):
    x, w, b = (torch.randn(*shape).to(dtype) for shape in ((rows, width), (width,), (width,)))
    x += 2
    before = torch.randn(rows, width).to(dtype) if residual else None
    mine, plain = (None if before is None else before.clone() for _ in range(2))
    mine = there(mine)
    got = norm_gpu(there(x), there(w), there(b) if bias else None, 1e-5, mine)
    want = layer_norm_reference(x, w, b, 1e-5, plain) if bias else rms_norm_reference(x, w, 1e-5, plain)
    assert_close(got, want)
    if residual:
        assert_close(mine, plain)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_with_a_residual_on_the_processor(dtype):
    x, w, b, before = (torch.randn(*shape).to(dtype) for shape in ((5, 33), (33,), (33,), (5, 33)))
    residual = before.clone()
    assert_close(rms_norm(x, w, 1e-5, residual), rms_norm_reference(before + x, w, 1e-5))
    assert torch.equal(residual, before + x)
    assert_close(layer_norm(x, w, b, 1e-5, residual), layer_norm_reference(before + x + x, w, b, 1e-5))
    assert torch.equal(residual, before + x + x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 99), (2, 1500)])
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # e^-x of a far negative gate: infinite, as meant
@needs_triton
def test_gates(dtype, rows, width):
    x = (torch.randn(rows, 2 * width) * 4).to(dtype)
    assert_close(gated_gpu(there(x), 1.0, 0.0), swiglu_reference(x))
    assert_close(gated_gpu(there(x), SLOPE, BEND), geglu_reference(x))


def test_geglu_on_the_processor():
    x = torch.randn(65, 2 * 99) * 4
    torch.testing.assert_close(geglu(x), geglu_reference(x), atol=2e-6, rtol=2e-5)
    extremes = torch.tensor([[-200.0, 200.0, 2.0, 3.0]])
    torch.testing.assert_close(geglu(extremes), geglu_reference(extremes))


def new_tokens(tokens, heads, kv_heads, head_size, block_size, dtype=torch.float32, seed=0):
    """q, k and v as views of one tensor, where they are, their places in a cache, and an empty cache."""
    g = torch.Generator().manual_seed(seed)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_size, generator=g).to(dtype)
    angles = torch.outer(torch.arange(50.0), torch.rand(head_size // 2, generator=g))
    blocks = -(-tokens // block_size) + 2
    where = torch.randint(0, 50, (tokens,), generator=g), angles.cos(), angles.sin()
    slots = torch.randperm(blocks * block_size, generator=g)[:tokens]
    keys = torch.zeros(blocks, kv_heads, head_size, block_size, dtype=dtype)
    return qkv, where, slots, [keys, torch.zeros(blocks, kv_heads, block_size, head_size, dtype=dtype)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_size", "block_size"),
    [(1, 1, 1, 2, 16), (7, 3, 2, 80, 16), (1030, 1, 1, 8, 3)],
)
@needs_triton
def test_rotate_and_write(dtype, tokens, heads, kv_heads, head_size, block_size):
    qkv, where, slots, cache = new_tokens(tokens, heads, kv_heads, head_size, block_size, dtype)
    mine, my_cache, both = there(qkv.clone()), there([t.clone() for t in cache]), heads + kv_heads
    parts = [mine[:, :heads], mine[:, heads:both], mine[:, both:]]
    rotate_and_write_gpu(*parts, *there(*where), *my_cache, there(slots))
    rotate_and_write_reference(qkv[:, :heads], qkv[:, heads:both], qkv[:, both:], *where, *cache, slots)
    assert_close(mine[:, :heads], qkv[:, :heads])
    assert torch.equal(mine[:, both:].cpu(), qkv[:, both:])
    for got, want in zip(my_cache, cache, strict=True):
        assert_close(got, want)
        assert got.count_nonzero() == want.count_nonzero()


@settings(max_examples=10)
@given(st.integers(1, 20), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9))
@needs_triton
def test_any_write_and_any_rotation(tokens, heads, half, block_size):
    qkv, where, slots, cache = new_tokens(tokens, 1, heads, 2 * half, block_size)
    k, v = qkv[:, :heads, 1:], qkv[:, heads : 2 * heads, :-1]  # odd sizes, and views
    cache = [
        torch.zeros(len(cache[0]), heads, 2 * half - 1, block_size),
        torch.zeros(len(cache[0]), heads, block_size, 2 * half - 1),
    ]
    mine = there([t.clone() for t in cache])
    kv_write_gpu(there(qkv)[:, :heads, 1:], there(qkv)[:, heads : 2 * heads, :-1], *mine, there(slots))
    kv_write_reference(k, v, *cache, slots)
    assert all(torch.equal(got.cpu(), want) for got, want in zip(mine, cache, strict=True))
    rotated = there(qkv.clone())
    rotate_gpu(rotated, *there(*where))
    rotate_reference(qkv, *where)
    assert_close(rotated, qkv)


def test_rotate_and_write_on_the_processor():
    qkv, where, slots, cache = new_tokens(37, 4, 2, 24, 16)
    mine, my_cache = qkv.clone(), [t.clone() for t in cache]
    rotate_and_write(mine[:, :4], mine[:, 4:6], mine[:, 6:], *where, *my_cache, slots)
    rotate_and_write_reference(qkv[:, :4], qkv[:, 4:6], qkv[:, 6:], *where, *cache, slots)
    assert_close(mine[:, :4], qkv[:, :4])
    for got, want in zip(my_cache, cache, strict=True):
        assert_close(got, want)
