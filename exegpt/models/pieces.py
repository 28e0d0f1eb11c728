"""Long batches in pieces: what a piece needs in between stays in the cache, and memory once mapped is used again."""

from collections.abc import Callable

import torch

_ROWS = 1024


def in_pieces(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """`function`, which treats every row of its tensors [rows, width] alone, over pieces of them."""
    if len(tensors[0]) <= _ROWS:
        return function(*tensors)
    return torch.cat([function(*piece) for piece in zip(*(t.split(_ROWS) for t in tensors), strict=True)])
