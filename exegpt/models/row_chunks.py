"""Long batches in pieces on the processor: what a piece needs in between stays in its caches, and memory once mapped is
used again. A GPU has neither gain, and takes them whole: fewer launches of larger kernels.
"""

from collections.abc import Callable

import torch

from exegpt.kernels import device

_ROWS = 1024


def in_pieces(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """`function`, which treats every row of its tensors [rows, width] alone, over pieces of them."""
    if len(tensors[0]) <= _ROWS or device.on_gpu(tensors[0]):
        return function(*tensors)
    return torch.cat([function(*piece) for piece in zip(*(t.split(_ROWS) for t in tensors), strict=True)])
