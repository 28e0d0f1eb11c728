"""The kernels that treat every row alone, against their plain references."""

import numpy as np
import pytest
import torch
from numba import njit

from exegpt.kernels.argmax import argmax, argmax_reference
from exegpt.kernels.exponential import exp
from exegpt.kernels.greatest import greatest
from exegpt.kernels.kv_layout import key_shape
from exegpt.kernels.norm import layer_norm, layer_norm_reference, rms_norm, rms_norm_reference
from exegpt.kernels.rotary import rotate, rotate_and_write, rotate_and_write_reference, rotate_reference
from exegpt.kernels.swiglu import geglu, geglu_reference, swiglu, swiglu_reference


@pytest.mark.parametrize("rows", [1, 2, 65])
@pytest.mark.parametrize("width", [1, 7, 64, 513])
def test_rms_norm(rows, width):
    x, w = torch.randn(rows, width) * 3, torch.rand(width)
    torch.testing.assert_close(rms_norm(x, w, 1e-5), rms_norm_reference(x, w, 1e-5), atol=1e-6, rtol=2e-6)


@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("width", [1, 9, 352])
def test_swiglu(rows, width):
    x = torch.randn(rows, 2 * width) * 4
    torch.testing.assert_close(swiglu(x), swiglu_reference(x), atol=1e-6, rtol=5e-6)


def test_swiglu_of_extremes():
    x = torch.tensor([[-200.0, 200.0, -90.0, 0.0, 2.0, 3.0, 4.0, 5.0]])
    torch.testing.assert_close(swiglu(x), swiglu_reference(x), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("tokens", "heads", "head_size"), [(1, 1, 2), (7, 3, 64), (33, 2, 40)])
def test_rotate(tokens, heads, head_size):
    angles = torch.outer(torch.arange(50.0), torch.rand(head_size // 2))
    positions = torch.randint(0, 50, (tokens,))
    wide = torch.randn(tokens, heads + 2, head_size)  # a view, as in the layers
    expected = wide.clone()
    rotate(wide[:, 1:-1], positions, angles.cos(), angles.sin())
    rotate_reference(expected[:, 1:-1], positions, angles.cos(), angles.sin())
    torch.testing.assert_close(wide, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("vocab", [1, 2, 511, 512, 513, 1500])
def test_argmax(vocab):
    x = torch.randn(9, vocab)
    assert torch.equal(argmax(x), argmax_reference(x))
    assert torch.equal(argmax(-x.abs()), argmax_reference(-x.abs()))


def test_argmax_takes_the_first_of_equals():
    x = torch.zeros(3, 1200)
    x[1, [700, 40, 1100]] = 2.0
    x[2] = -1.0
    assert argmax(x).tolist() == [0, 40, 0]


def test_exp():
    @njit
    def all_of(x, out):
        for i in range(len(x)):
            out[i] = exp(x[i])

    x = np.linspace(-86, 88, 20001, dtype=np.float32)
    out = np.empty_like(x)
    all_of(x, out)
    np.testing.assert_allclose(out, np.exp(x.astype(np.float64)), rtol=1e-5)
    near = np.abs(x) < 1
    np.testing.assert_allclose(out[near], np.exp(x[near].astype(np.float64)), rtol=3e-7)


@pytest.mark.parametrize("size", [1, 3, 16, 100])
@pytest.mark.parametrize("shift", [-50.0, 0.0, 50.0])
def test_greatest(size, shift):
    x = (np.random.default_rng(size).standard_normal(size) + shift).astype(np.float32)
    assert greatest(x) == x.max()


def test_greatest_of_infinities():
    assert greatest(np.array([-np.inf, -1, np.inf], np.float32)) == np.inf
    assert greatest(np.array([-np.inf, -np.inf], np.float32)) == -np.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_norms_of_every_dtype_on_the_cpu(dtype):
    x, w, b, before = (torch.randn(*shape).to(dtype) for shape in ((5, 33), (33,), (33,), (5, 33)))
    residual = before.clone()
    torch.testing.assert_close(rms_norm(x, w, 1e-5), rms_norm_reference(x, w, 1e-5))
    torch.testing.assert_close(layer_norm(x, w, b, 1e-5, residual), layer_norm_reference(before + x, w, b, 1e-5))
    assert torch.equal(residual, before + x)


def test_geglu_on_the_cpu():
    x = torch.randn(65, 2 * 99) * 4
    expected = geglu_reference(x.double()).float()  # in float32 1 + tanh loses what is left of far negative gates
    torch.testing.assert_close(geglu(x), expected, atol=1e-6, rtol=2e-5)
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
    values = torch.zeros(blocks, kv_heads, block_size, head_size, dtype=dtype)
    return qkv, where, slots, [torch.zeros(key_shape(values), dtype=dtype), values]


def test_rotate_and_write_on_the_cpu():
    qkv, where, slots, cache = new_tokens(37, 4, 2, 24, 16)
    mine, my_cache = qkv.clone(), [t.clone() for t in cache]
    rotate_and_write(mine[:, :4], mine[:, 4:6], mine[:, 6:], *where, *my_cache, slots)
    rotate_and_write_reference(qkv[:, :4], qkv[:, 4:6], qkv[:, 6:], *where, *cache, slots)
    torch.testing.assert_close(mine[:, :4], qkv[:, :4])
    for got, expected in zip(my_cache, cache, strict=True):
        torch.testing.assert_close(got, expected)


def test_rotate_and_write_of_separate_tensors():
    qkv, where, slots, cache = new_tokens(9, 4, 2, 24, 16)
    joined, joined_cache = qkv.clone(), [t.clone() for t in cache]
    rotate_and_write(joined[:, :4], joined[:, 4:6], joined[:, 6:], *where, *joined_cache, slots)
    q, k, v = qkv[:, :4].clone(), qkv[:, 4:6].clone(), qkv[:, 6:].clone()
    rotate_and_write(q, k, v, *where, *cache, slots)
    assert torch.equal(q, joined[:, :4])
    assert all(torch.equal(a, b) for a, b in zip(cache, joined_cache, strict=True))
