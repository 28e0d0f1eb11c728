"""Packing: the arrays of a batch one after the other in one buffer, so that one copy brings all of them to a GPU."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from xcore.arrays import Numbers
from xrunner.comm.gpu import Gpu

_ALIGNED = 16
"""Every array begins at a multiple of this number of bytes."""


def send(arrays: Sequence[Numbers], gpu: Gpu | None) -> list[torch.Tensor]:
    """Return the arrays as tensors.

    On a GPU they arrive by one asynchronous copy from pinned memory. Without a GPU (None), they share the arrays'
    memory.
    """
    if gpu is None:
        return [torch.from_numpy(array) for array in arrays]
    buffer = torch.empty(packed_bytes(arrays), dtype=torch.uint8, device=gpu.device)
    fill(buffer, arrays, gpu)
    return views(buffer, arrays)


def fill(buffer: torch.Tensor, arrays: Sequence[Numbers], gpu: Gpu) -> None:
    """Copy the arrays into a buffer on the device, uint8 [packed_bytes]."""
    if not len(buffer):
        return
    host = gpu.pinned(len(buffer))
    for (begin, end), array in zip(_places(arrays), arrays, strict=True):
        host.numpy()[begin:end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    gpu.copy(buffer, host)


def views(buffer: torch.Tensor, arrays: Sequence[Numbers]) -> list[torch.Tensor]:
    """Return the buffer's parts, each of its array's dtype and shape."""
    kinds = [torch.from_numpy(np.empty(0, array.dtype)).dtype for array in arrays]
    parts = zip(_places(arrays), kinds, arrays, strict=True)
    return [buffer[begin:end].view(kind).view(array.shape) for (begin, end), kind, array in parts]


def packed_bytes(arrays: Sequence[Numbers]) -> int:
    """Return the bytes of a buffer for all arrays."""
    return max((-(-end // _ALIGNED) * _ALIGNED for _, end in _places(arrays)), default=0)


def _places(arrays: Sequence[Numbers]) -> Iterator[tuple[int, int]]:
    """Yield where each array begins and ends, in bytes."""
    begin = 0
    for array in arrays:
        yield begin, begin + array.nbytes
        begin += -(-array.nbytes // _ALIGNED) * _ALIGNED
