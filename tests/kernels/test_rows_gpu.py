"""The Triton kernels that treat every row alone, against their plain references."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from exegpt.kernels.kv_layout import keys_like_values
from exegpt.kernels.kv_write import kv_write_reference
from exegpt.kernels.kv_write_gpu import kv_write_gpu
from exegpt.kernels.norm import layer_norm_reference, rms_norm_reference
from exegpt.kernels.norm_gpu import norm_gpu
from exegpt.kernels.rotary import rotate_and_write_reference, rotate_reference
from exegpt.kernels.rotary_gpu import rotate_and_write_gpu, rotate_gpu
from exegpt.kernels.swiglu import BEND, SLOPE, geglu_reference, swiglu_reference
from exegpt.kernels.swiglu_gpu import gated_gpu

from .gpu import cache_there, needs_triton, there
from .test_rows import new_tokens

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CLOSE = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def assert_close(got, expected):
    error = CLOSE[expected.dtype]
    torch.testing.assert_close(got.cpu(), expected, atol=error, rtol=error)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 77), (2, 513), (5, 64)])
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
    plain = x if plain is None else plain.add_(x)
    expected = layer_norm_reference(plain, w, b, 1e-5) if bias else rms_norm_reference(plain, w, 1e-5)
    assert_close(got, expected)
    if residual:
        assert_close(mine, plain)


@needs_triton
def test_rows_that_are_parts_of_wider_ones():
    """Norms and gates of views; what lies beside the residual stays as it is."""
    x, residual = torch.randn(2, 4, 50).unbind()
    w, b = torch.randn(2, 30)
    mine = there(residual.clone())
    got = norm_gpu(there(x)[:, 7:37], there(w), there(b), 1e-5, mine[:, 3:33])
    assert_close(got, layer_norm_reference(x[:, 7:37], w, b, 1e-5, residual[:, 3:33]))
    assert_close(mine, residual)
    assert_close(gated_gpu(there(x)[:, 7:37], 1.0, 0.0), swiglu_reference(x[:, 7:37]))


@settings(max_examples=10)
@given(st.integers(1, 4), st.integers(1, 1100), st.floats(1e-4, 1e4))
@needs_triton
def test_norms_and_gates_of_any_size(rows, width, height):
    x, w = torch.randn(rows, width) * height, torch.randn(width)
    assert_close(norm_gpu(there(x), there(w), None, 1e-5, None), rms_norm_reference(x, w, 1e-5))
    gates = torch.randn(rows, 2 * width)
    assert_close(gated_gpu(there(gates), SLOPE, BEND), geglu_reference(gates.double()).float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 99), (2, 1500)])
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # e^-x of a far negative gate: infinite, as meant
@needs_triton
def test_gates(dtype, rows, width):
    x = (torch.randn(rows, 2 * width) * 4).to(dtype)
    wide = x.double()  # in float32 1 + tanh loses what is left of far negative gates
    assert_close(gated_gpu(there(x), 1.0, 0.0), swiglu_reference(wide).to(dtype))
    assert_close(gated_gpu(there(x), SLOPE, BEND), geglu_reference(wide).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_size", "block_size"),
    [(1, 1, 1, 2, 16), (7, 3, 2, 80, 16), (5, 7, 1, 24, 4), (1, 3, 3, 96, 16), (1030, 1, 1, 8, 3)],
)
@needs_triton
def test_rotate_and_write(dtype, tokens, heads, kv_heads, head_size, block_size):
    qkv, where, slots, cache = new_tokens(tokens, heads, kv_heads, head_size, block_size, dtype)
    mine, my_cache, both = there(qkv.clone()), cache_there(*cache), heads + kv_heads
    parts = [mine[:, :heads], mine[:, heads:both], mine[:, both:]]
    rotate_and_write_gpu(*parts, *there(*where), *my_cache, there(slots))
    rotate_and_write_reference(qkv[:, :heads], qkv[:, heads:both], qkv[:, both:], *where, *cache, slots)
    assert_close(mine[:, :heads], qkv[:, :heads])
    assert torch.equal(mine[:, both:].cpu(), qkv[:, both:])
    for got, expected in zip(my_cache, (keys_like_values(cache[0]), cache[1]), strict=True):
        assert_close(got, expected)
        assert got.count_nonzero() == expected.count_nonzero()


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
    mine = cache_there(*cache)
    kv_write_gpu(there(qkv)[:, :heads, 1:], there(qkv)[:, heads : 2 * heads, :-1], *mine, there(slots))
    kv_write_reference(k, v, *cache, slots)
    assert torch.equal(mine[0].cpu(), keys_like_values(cache[0])) and torch.equal(mine[1].cpu(), cache[1])
    rotated = there(qkv.clone())
    rotate_gpu(rotated, *there(*where))
    rotate_reference(qkv, *where)
    assert_close(rotated, qkv)
