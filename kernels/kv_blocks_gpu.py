"""Copying blocks of the paged cache on a GPU: all layers' keys and values by one launch."""

import functools
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_WORDS = 2048
"""Words of four bytes that one program copies at most."""


def copy_blocks_gpu(cache: Sequence[torch.Tensor], blocks: torch.Tensor, buffer: torch.Tensor, gather: bool) -> None:
    """`kv_blocks.gather_blocks`, or else `scatter_blocks`, by Triton."""
    itemsize = buffer.element_size()
    part_bytes, block_bytes = buffer.shape[2] * itemsize, cache[0].stride(0) * itemsize
    addresses = tuple(tensor.data_ptr() for tensor in cache)
    aligned = math.gcd(16, part_bytes, block_bytes, buffer.data_ptr(), *addresses)
    word = 4 if aligned % 4 == 0 else 1
    size = min(_WORDS, triton.next_power_of_2(part_bytes // word))
    _copy[len(blocks), triton.cdiv(part_bytes // word, size), len(cache)](
        _table(addresses, blocks.device),
        blocks,
        buffer,
        part_bytes // word,
        block_bytes // word,
        GATHER=gather,
        WORD=tl.int32 if word == 4 else tl.int8,
        SIZE=size,
        ALIGNED=aligned,
        num_warps=4,
    )


@functools.lru_cache(maxsize=64)
def _table(addresses: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Addresses on the device. A cache is allocated once, so its own are copied there once."""
    return torch.tensor(addresses, dtype=torch.int64, device=device)


@triton.jit
def _copy(  # type: ignore[no-untyped-def]
    addresses,  # int64 [tensors], of the cache's
    blocks,  # int64 [n]
    buffer,  # [tensors, n, part_words] words
    part_words,
    block_words,
    GATHER: tl.constexpr,
    WORD: tl.constexpr,
    SIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Some words of one block's part of one tensor."""
    i, tensor = tl.program_id(0).to(tl.int64), tl.program_id(2)
    word = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    block = tl.load(blocks + i)
    in_cache = tl.multiple_of(tl.load(addresses + tensor).to(tl.pointer_type(WORD)), ALIGNED) + block * block_words
    in_buffer = buffer.to(tl.pointer_type(WORD)) + (tensor * tl.num_programs(0) + i) * part_words
    if GATHER:
        tl.store(in_buffer + word, tl.load(in_cache + word, mask=word < part_words), mask=word < part_words)
    else:
        tl.store(in_cache + word, tl.load(in_buffer + word, mask=word < part_words), mask=word < part_words)
