"""Copying blocks of the paged cache on a GPU: all layers' keys and values by one launch."""

import functools
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_WORDS = 2048
"""Words of four bytes that one program copies at most."""


def copy_blocks_gpu(
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    source_blocks: torch.Tensor | None,
    target_blocks: torch.Tensor | None,
) -> None:
    """Block target_blocks[i] of each target ← block source_blocks[i] of the source beside it; None: i itself."""
    blocks = target_blocks if source_blocks is None else source_blocks
    assert blocks is not None
    block_bytes = sources[0][0].numel() * sources[0].element_size()
    addresses = [tuple(t.data_ptr() for t in tensors) for tensors in (sources, targets)]
    aligned = math.gcd(16, block_bytes, *addresses[0], *addresses[1])
    word = 4 if aligned % 4 == 0 else 1
    size = min(_WORDS, triton.next_power_of_2(block_bytes // word))
    grid = (len(blocks), triton.cdiv(block_bytes // word, size), len(sources))
    tables = [_table(some, blocks.device) for some in addresses]
    _copy[grid](
        *tables,
        source_blocks,
        target_blocks,
        block_bytes // word,
        WORD=tl.int32 if word == 4 else tl.int8,
        SIZE=size,
        ALIGNED=aligned,
        num_warps=4,
    )


@functools.lru_cache(maxsize=64)
def _table(addresses: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Addresses on the device. A cache and the buffers for it are allocated once, so they are copied there once."""
    return torch.tensor(addresses, dtype=torch.int64, device=device)


@triton.jit
def _copy(  # type: ignore[no-untyped-def]
    sources,
    targets,
    source_blocks,
    target_blocks,
    words,
    WORD: tl.constexpr,
    SIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """A piece of one block of one tensor."""
    i, tensor = tl.program_id(0), tl.program_id(2)
    source = i.to(tl.int64)
    target = i.to(tl.int64)
    if source_blocks is not None:
        source = tl.load(source_blocks + i)
    if target_blocks is not None:
        target = tl.load(target_blocks + i)
    word = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    from_address = tl.multiple_of(tl.load(sources + tensor).to(tl.pointer_type(WORD)), ALIGNED)
    to_address = tl.multiple_of(tl.load(targets + tensor).to(tl.pointer_type(WORD)), ALIGNED)
    held = tl.load(from_address + source * words + word, mask=word < words)
    tl.store(to_address + target * words + word, held, mask=word < words)
