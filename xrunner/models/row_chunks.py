"""Long batches in chunks of rows on the CPU: a chunk's intermediate results stay in the CPU's caches.

Mapped memory is also reused. A GPU gains neither and computes the whole batch at once: fewer launches of larger
kernels.
"""

from collections.abc import Callable, Sequence

import torch

from exegpt.kernels import gpu_device

_ROWS = 1024


def in_row_chunks(function: Callable[[Sequence[torch.Tensor]], torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """Compute `function` of tensors [rows, width] chunk by chunk: [rows, ...]. It must treat rows independently."""
    if len(tensors[0]) <= _ROWS or gpu_device.on_gpu(tensors[0]):
        return function(tensors)
    return torch.cat([function(chunk) for chunk in zip(*(t.split(_ROWS) for t in tensors), strict=True)])
