"""Blocks of the cache to a buffer, and back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exegpt.kernels.kv_blocks import gather_blocks, scatter_blocks

from .gpu import needs_triton, there

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def a_cache(tensors, blocks, kv_heads, head_size, block_size, dtype=torch.float32, seed=0):
    """Layers' keys and values with random content."""
    g = torch.Generator().manual_seed(seed)
    shapes = ((blocks, kv_heads, head_size, block_size), (blocks, kv_heads, block_size, head_size))
    return [torch.randn(*shapes[i % 2], generator=g).to(dtype) for i in range(tensors)]


def some_blocks(total, count, seed=1):
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:count]


def assert_same(got, reference):
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got, reference, strict=True))


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9), st.integers(1, 3), st.data(), st.sampled_from(DTYPES))
def test_gathered_blocks_come_back(tensors, blocks, count, heads, data, dtype):
    """Of all heads, or of some."""
    cache, chosen = a_cache(tensors, blocks, heads, 5, 3, dtype), some_blocks(blocks, count)
    first = data.draw(st.integers(0, heads - 1))
    held = slice(first, data.draw(st.integers(first + 1, heads)))
    buffer = torch.full((tensors, len(chosen), cache[0][0, held].numel()), float("nan"), dtype=dtype)
    gather_blocks([tensor[:, held] for tensor in cache], chosen, buffer)
    for tensor, part in zip(cache, buffer, strict=True):
        assert torch.equal(part, torch.stack([tensor[block, held].flatten() for block in chosen]))
    other = [torch.zeros_like(tensor) for tensor in cache]
    scatter_blocks(buffer, [tensor[:, held] for tensor in other], chosen)
    for mine, theirs in zip(other, cache, strict=True):
        assert torch.equal(mine[chosen][:, held], theirs[chosen][:, held])
        mine[chosen.unsqueeze(1), torch.arange(heads)[held]] = 0
        assert not mine.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "head_size", "block_size"), [(2, 5, 3), (3, 5, 3), (3, 80, 16)])
@pytest.mark.parametrize("held", [slice(None), slice(0, 1), slice(1, 3)])
@needs_triton
def test_on_a_gpu(dtype, kv_heads, head_size, block_size, held):
    from exegpt.kernels.kv_blocks_gpu import copy_blocks_gpu

    cache, chosen = a_cache(4, 9, kv_heads, head_size, block_size, dtype), some_blocks(9, 6)
    sources, targets = chosen[:3], chosen[3:]
    buffer = torch.zeros(4, 3, cache[0][0, held].numel(), dtype=dtype)
    mine, my_buffer = there(cache), there(buffer.clone())
    copy_blocks_gpu([tensor[:, held] for tensor in mine], there(sources), my_buffer, gather=True)
    gather_blocks([tensor[:, held] for tensor in cache], sources, buffer)
    assert_same([my_buffer], [buffer])
    scattered, expected = there([t.clone() for t in cache]), [t.clone() for t in cache]
    copy_blocks_gpu([tensor[:, held] for tensor in scattered], there(targets), my_buffer, gather=False)
    scatter_blocks(buffer, [tensor[:, held] for tensor in expected], targets)
    assert_same(scattered, expected)


@settings(max_examples=10)
@given(st.integers(1, 3), st.integers(1, 7), st.integers(1, 2000))
@needs_triton
def test_blocks_of_any_size_on_a_gpu(tensors, count, size):
    from exegpt.kernels.kv_blocks_gpu import copy_blocks_gpu

    cache = [torch.randn(8, size).half() for _ in range(tensors)]
    chosen = some_blocks(8, count)
    buffer = there(torch.zeros(tensors, count, size).half())
    copy_blocks_gpu(there(cache), there(chosen), buffer, gather=True)
    assert_same(list(buffer), [tensor[chosen] for tensor in cache])
