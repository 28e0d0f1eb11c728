"""Swap space: a swapped sequence finds its keys and values again, whatever the size of the pieces that are copied."""

import pytest
import torch

from tests.xcore.small_specs import MODEL
from xcore.batching import Swap
from xrunner.models import KVCache
from xrunner.models.device import CPU
from xrunner.rank.swap_space import SwapSpace, blocks_at_once

BLOCK_BYTES = MODEL.layers * 4 * MODEL.kv_bytes(1, "fp32")


class Gpu:
    """The CPU in the place of a GPU: copies between memories are made at once."""

    device = CPU

    def __init__(self):
        self.copied = []

    def pinned(self, count):
        return torch.empty(count, dtype=torch.uint8)

    def copy(self, target, source):
        self.copied.append(target.nbytes)
        target.copy_(source)


@pytest.mark.parametrize("at_once", [0, 1, 2, 5, 100])
@pytest.mark.parametrize("cached", range(8))
@pytest.mark.parametrize("gpu", [None, Gpu()])
def test_pieces_of_any_size_bring_the_same_keys_and_values_back(at_once, cached, gpu):
    """The cache still has the first `cached` of 7 blocks; the others come back at other places."""
    cache = KVCache.allocate(MODEL, MODEL.layers, 20, 4, "fp32")
    tensors = (*cache.keys, *cache.values)
    for tensor in tensors:
        tensor.copy_(torch.rand(tensor.shape))
    space = SwapSpace(cache, gpu, at_once * BLOCK_BYTES)
    blocks, other, back = (3, 1, 4, 15, 9, 2, 6), (0, 5), (7, 8, 10, 11, 12, 13, 14)[cached:]
    want = [tensor.clone() for tensor in tensors]
    for tensor in want:
        tensor[list(back)] = tensor[list(blocks[cached:])]
        tensor[[*blocks, *other]] = 0.0
    space.execute([Swap(1, "host", blocks, 27), Swap(2, "host", other, 8)])
    for tensor in tensors:
        tensor[[*blocks, *other]] = 0.0
    space.execute([Swap(2, "nowhere"), Swap(1, "cache", back, max(0, 27 - 4 * cached))])
    assert not len(space) and all(map(torch.equal, tensors, want))
    assert not gpu or max(gpu.copied) <= max(at_once, 1) * BLOCK_BYTES
    if gpu:
        gpu.copied.clear()


def test_a_rank_without_a_cache_swaps_nothing():
    space = SwapSpace(KVCache((), ()))
    space.execute(())
    assert not len(space)


def test_a_piece_is_at_least_a_block_and_never_more_than_the_buffer():
    assert blocks_at_once(BLOCK_BYTES, 0) == blocks_at_once(BLOCK_BYTES, 2 * BLOCK_BYTES - 1) == 1
    assert blocks_at_once(BLOCK_BYTES, 3 * BLOCK_BYTES) == 3
