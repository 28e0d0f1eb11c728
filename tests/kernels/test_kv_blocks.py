"""Blocks of the cache to a buffer, back, and within the cache."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exegpt.kernels.kv_blocks import gather_blocks, move_blocks, move_blocks_reference, scatter_blocks

from .gpu import needs_triton, there

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def a_cache(tensors, blocks, kv_heads, head_size, block_size, dtype=torch.float32, seed=0):
    """Layers' keys and values with random content."""
    g = torch.Generator().manual_seed(seed)
    shapes = ((blocks, kv_heads, head_size, block_size), (blocks, kv_heads, block_size, head_size))
    return [torch.randn(*shapes[i % 2], generator=g).to(dtype) for i in range(tensors)]


def some_blocks(total, count, seed=1):
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:count]


def assert_same(got, want):
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9), st.integers(1, 3), st.sampled_from(DTYPES))
def test_gathered_blocks_come_back(tensors, blocks, count, heads, dtype):
    cache, chosen = a_cache(tensors, blocks, heads, 5, 3, dtype), some_blocks(blocks, count)
    buffer = torch.full((tensors, len(chosen), heads * 15), float("nan"), dtype=dtype)
    gather_blocks(cache, chosen, buffer)
    for tensor, part in zip(cache, buffer, strict=True):
        assert torch.equal(part, torch.stack([tensor[block].flatten() for block in chosen]))
    other = [torch.zeros_like(tensor) for tensor in cache]
    scatter_blocks(buffer, other, chosen)
    rest = [block for block in range(blocks) if block not in chosen.tolist()]
    assert_same([tensor[chosen] for tensor in other], [tensor[chosen] for tensor in cache])
    assert not any(tensor[rest].any() for tensor in other)


@given(st.integers(1, 4), st.integers(2, 12), st.data())
def test_moves(tensors, blocks, data):
    count = data.draw(st.integers(0, blocks // 2))
    chosen = some_blocks(blocks, 2 * count)
    mine, plain = (a_cache(tensors, blocks, 2, 4, 3) for _ in range(2))
    move_blocks(mine, chosen[:count], chosen[count:])
    move_blocks_reference(plain, chosen[:count], chosen[count:])
    assert_same(mine, plain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "head_size", "block_size"), [(2, 5, 3), (1, 5, 3), (2, 80, 16)])
@needs_triton
def test_on_a_gpu(dtype, kv_heads, head_size, block_size):
    from exegpt.kernels.kv_blocks_gpu import copy_blocks_gpu

    cache, chosen = a_cache(4, 9, kv_heads, head_size, block_size, dtype), some_blocks(9, 6)
    sources, targets = chosen[:3], chosen[3:]
    buffer = torch.zeros(4, 3, kv_heads * head_size * block_size, dtype=dtype)
    mine, my_buffer = there(cache), there(buffer.clone())
    copy_blocks_gpu(mine, list(my_buffer), there(sources), None)
    gather_blocks(cache, sources, buffer)
    assert_same([my_buffer], [buffer])
    moved, expected = there([t.clone() for t in cache]), [t.clone() for t in cache]
    copy_blocks_gpu(moved, moved, there(sources), there(targets))
    move_blocks_reference(expected, sources, targets)
    assert_same(moved, expected)
    scattered = there([t.clone() for t in cache])
    copy_blocks_gpu(list(my_buffer), scattered, None, there(targets))
    assert_same(scattered, expected)


@settings(max_examples=10)
@given(st.integers(1, 3), st.integers(1, 7), st.integers(1, 2000))
@needs_triton
def test_blocks_of_any_size_on_a_gpu(tensors, count, size):
    from exegpt.kernels.kv_blocks_gpu import copy_blocks_gpu

    cache = [torch.randn(8, size).half() for _ in range(tensors)]
    chosen = some_blocks(8, count)
    buffer = there(torch.zeros(tensors, count, size).half())
    copy_blocks_gpu(there(cache), list(buffer), there(chosen), None)
    assert_same(list(buffer), [tensor[chosen] for tensor in cache])
