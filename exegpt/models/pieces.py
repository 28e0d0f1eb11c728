"""Long batches in pieces: what a piece needs in between stays in the cache, and memory once mapped is used again."""

from collections.abc import Callable

import torch

_ROWS = 1024


def in_pieces(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """`function`, which treats every row of x [rows, width] alone, over pieces of it."""
    if len(x) <= _ROWS:
        return function(x)
    return torch.cat([function(piece) for piece in x.split(_ROWS)])
