"""Copying blocks of the paged cache on a GPU: all layers' keys and values by one launch."""

import functools
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_BLOCK_SIZE = 2048
"""Most words that one program copies."""


def copy_blocks_gpu(cache: Sequence[torch.Tensor], blocks: torch.Tensor, buffer: torch.Tensor, gather: bool) -> None:
    """Run `kv_blocks.gather_blocks`, or else `scatter_blocks`, by Triton."""
    itemsize = buffer.element_size()
    part_bytes, block_bytes = buffer.shape[2] * itemsize, cache[0].stride(0) * itemsize
    addresses = tuple(tensor.data_ptr() for tensor in cache)
    alignment = math.gcd(16, part_bytes, block_bytes, buffer.data_ptr(), *addresses)
    word_bytes = 4 if alignment % 4 == 0 else 1
    part_words = part_bytes // word_bytes
    block_size = min(_BLOCK_SIZE, triton.next_power_of_2(part_words))
    _copy[len(blocks), triton.cdiv(part_words, block_size), len(cache)](
        addresses_ptr=_on_device(addresses, blocks.device),
        blocks_ptr=blocks,
        buffer_ptr=buffer,
        part_words=part_words,
        block_words=block_bytes // word_bytes,
        GATHER=gather,
        WORD=tl.int32 if word_bytes == 4 else tl.int8,
        BLOCK_SIZE=block_size,
        ALIGNMENT=alignment,
        num_warps=4,
    )


@functools.lru_cache(maxsize=64)
def _on_device(addresses: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return addresses on the device. A cache is allocated once, so its addresses are copied there once."""
    return torch.tensor(addresses, dtype=torch.int64, device=device)


@triton.jit
def _copy(
    addresses_ptr,  # int64 [tensors]: of the cache's
    blocks_ptr,  # int64 [n]
    buffer_ptr,  # [tensors, n, part_words] words
    part_words,  # words of a block that are copied
    block_words,  # words from one block to the next
    GATHER: tl.constexpr,
    WORD: tl.constexpr,  # dtype of a word
    BLOCK_SIZE: tl.constexpr,  # words that a program copies
    ALIGNMENT: tl.constexpr,  # bytes that divide all addresses, a block and a part
):
    """Copy some words of one block's part of one tensor."""
    i, tensor = tl.program_id(0).to(tl.int64), tl.program_id(2)
    words = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = words < part_words
    block = tl.load(blocks_ptr + i)
    cache_ptr = tl.multiple_of(tl.load(addresses_ptr + tensor).to(tl.pointer_type(WORD)), ALIGNMENT)
    in_cache = cache_ptr + block * block_words
    in_buffer = buffer_ptr.to(tl.pointer_type(WORD)) + (tensor * tl.num_programs(0) + i) * part_words
    if GATHER:
        tl.store(in_buffer + words, tl.load(in_cache + words, mask=mask), mask=mask)
    else:
        tl.store(in_cache + words, tl.load(in_buffer + words, mask=mask), mask=mask)
