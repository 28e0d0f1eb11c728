"""Swap space: keys and values of swapped sequences in a rank's host memory.

Copies are queued like a batch's layers, so the work ordered before them is complete: a swapped block has the keys and
values of all its tokens, and the blocks of a sequence that comes back have lost their last holders.

On a GPU, copies pass through one contiguous buffer, piece by piece, so that they need little of its memory.
"""

from collections.abc import Iterable
from math import prod

import numpy as np
import torch

from exegpt.kernels.kv_blocks import gather_blocks, scatter_blocks
from xcore.batching import Swap
from xrunner.comm.gpu import Gpu
from xrunner.comm.packing import send
from xrunner.models import KVCache

BUFFER_BYTES = 64 * 2**20
"""Bytes of a GPU's buffer. If a block is larger, the buffer has the size of a block."""


def blocks_at_once(block_bytes: int, buffer_bytes: int = BUFFER_BYTES) -> int:
    """Return how many of a rank's blocks pass through the buffer at once."""
    return max(1, buffer_bytes // block_bytes)


class SwapSpace:
    """The host's copies of one rank's blocks, by the index of their sequence; the ledger limits how many there are."""

    def __init__(self, cache: KVCache, gpu: Gpu | None = None, buffer_bytes: int = BUFFER_BYTES):
        self._tensors = [tensor.flatten(2) for tensor in (*cache.keys, *cache.values)]
        self._gpu = gpu
        self._buffer_bytes = buffer_bytes
        self._buffer: torch.Tensor | None = None
        """The GPU's buffer, uint8 [bytes]; None before the first copy."""
        self._kept: dict[int, list[torch.Tensor]] = {}
        """By sequence: its pieces on the host, [tensors, blocks, elements of a block], in the order of its tokens."""

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def _block_bytes(self) -> int:
        """Bytes of a block; an encoder's rank has no cache, and no swaps."""
        return sum(tensor[0].nbytes for tensor in self._tensors)

    @property
    def _at_once(self) -> int:
        return blocks_at_once(self._block_bytes, self._buffer_bytes)

    def execute(self, swaps: Iterable[Swap]) -> None:
        """Make these copies, in order."""
        for swap in swaps:
            if swap.to == "host":
                count = self._at_once
                pieces = [swap.blocks[begin : begin + count] for begin in range(0, len(swap.blocks), count)]
                self._kept[swap.index] = [self._from_cache(piece) for piece in pieces]
                continue
            kept = self._kept.pop(swap.index)
            if swap.to == "cache":
                self._bring_back(kept, swap.blocks)

    def _bring_back(self, kept: list[torch.Tensor], blocks: tuple[int, ...]) -> None:
        """Copy a sequence's last pieces to these blocks; the cache still has the blocks before them."""
        cached = sum(piece.shape[1] for piece in kept) - len(blocks)
        for piece in kept:
            missing = piece[:, cached:]
            cached, count = max(0, cached - piece.shape[1]), missing.shape[1]
            if count:
                self._to_cache(missing, blocks[:count])
                blocks = blocks[count:]

    def _from_cache(self, blocks: tuple[int, ...]) -> torch.Tensor:
        first = self._tensors[0]
        shape = len(self._tensors), len(blocks), first[0].numel()
        buffer = self._staging(shape) if self._gpu else torch.empty(shape, dtype=first.dtype)
        gather_blocks(self._tensors, self._index(blocks), buffer)
        if self._gpu is None:
            return buffer
        host = self._gpu.pinned(buffer.nbytes).view(buffer.dtype).view(shape)
        self._gpu.copy(host, buffer)
        return host

    def _to_cache(self, kept: torch.Tensor, blocks: tuple[int, ...]) -> None:
        buffer = kept
        if self._gpu:
            buffer = self._staging(tuple(kept.shape))
            self._gpu.copy(buffer, kept)
        scatter_blocks(buffer, self._tensors, self._index(blocks))

    def _staging(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the beginning of the GPU's buffer as a piece. Copies are in order, so each one may reuse it."""
        first = self._tensors[0]
        if self._buffer is None:
            self._buffer = torch.empty(self._at_once * self._block_bytes, dtype=torch.uint8, device=first.device)
        return self._buffer[: prod(shape) * first.itemsize].view(first.dtype).view(shape)

    def _index(self, blocks: tuple[int, ...]) -> torch.Tensor:
        """Return the blocks' numbers on the cache's device, [n]."""
        (index,) = send([np.array(blocks, dtype=np.int64)], self._gpu)
        return index
