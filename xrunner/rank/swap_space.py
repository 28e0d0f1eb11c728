"""Swap space: keys and values of swapped sequences in a rank's host memory.

Copies are queued like a batch's layers, so the work ordered before them is complete: a swapped block has the keys and
values of all its tokens, and the blocks of a sequence that comes back have lost their last holders.
"""

from collections.abc import Iterable

import numpy as np
import torch

from exegpt.kernels.kv_blocks import gather_blocks, scatter_blocks
from xcore.batching import Swap
from xrunner.comm.gpu import Gpu
from xrunner.comm.packing import send
from xrunner.models import KVCache


class SwapSpace:
    """The host's copies of one rank's blocks, by the index of their sequence; the ledger limits how many there are."""

    def __init__(self, cache: KVCache, gpu: Gpu | None = None):
        self._tensors = [tensor.flatten(2) for tensor in (*cache.keys, *cache.values)]
        self._gpu = gpu
        self._kept: dict[int, torch.Tensor] = {}
        """Of each sequence on the host: [tensors, blocks, elements of a block]."""

    def __len__(self) -> int:
        return len(self._kept)

    def execute(self, swaps: Iterable[Swap]) -> None:
        """Make these copies, in order."""
        for swap in swaps:
            if swap.to == "host":
                self._kept[swap.index] = self._from_cache(swap.blocks)
                continue
            kept = self._kept.pop(swap.index)
            if swap.to == "cache" and swap.blocks:
                self._to_cache(kept[:, kept.shape[1] - len(swap.blocks) :], swap.blocks)

    def _from_cache(self, blocks: tuple[int, ...]) -> torch.Tensor:
        first = self._tensors[0]
        shape = len(self._tensors), len(blocks), first[0].numel()
        buffer = torch.empty(shape, dtype=first.dtype, device=first.device)
        gather_blocks(self._tensors, self._index(blocks), buffer)
        if self._gpu is None:
            return buffer
        host = self._gpu.pinned(buffer.nbytes).view(buffer.dtype).view(shape)
        self._gpu.copy(host, buffer)
        return host

    def _to_cache(self, kept: torch.Tensor, blocks: tuple[int, ...]) -> None:
        buffer = kept
        if self._gpu:
            buffer = torch.empty(kept.shape, dtype=kept.dtype, device=self._gpu.device)
            self._gpu.copy(buffer, kept)
        scatter_blocks(buffer, self._tensors, self._index(blocks))

    def _index(self, blocks: tuple[int, ...]) -> torch.Tensor:
        """Return the blocks' numbers on the cache's device, [n]."""
        (index,) = send([np.array(blocks, dtype=np.int64)], self._gpu)
        return index
