"""Greedy sampling: the place of the greatest logit."""

import torch
from numba import prange

from exegpt.kernels.compiled import njit
from exegpt.kernels.greatest import greatest
from exegpt.kernels.threads import compiled

_CHUNK = 512
"""Logits looked at together."""


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The place of every row's greatest value, the first where several are equal: [rows, vocab] → int64 [rows]."""
    if not compiled(logits):
        return argmax_reference(logits)
    out = torch.empty(len(logits), dtype=torch.int64)
    _argmax(logits.numpy(), out.numpy())
    return out


def argmax_reference(logits: torch.Tensor) -> torch.Tensor:
    """`argmax` in plain PyTorch."""
    return logits.argmax(dim=-1)


@njit
def place_of_greatest(line):  # type: ignore[no-untyped-def]
    """The place of a line's greatest value, the first where several are equal."""
    # The greatest of each chunk in vector registers, then its place within the winning chunk.
    top, first = line[0], 0
    for start in range(0, len(line), _CHUNK):
        value = greatest(line[start : start + _CHUNK])
        if value > top:
            top, first = value, start
    while first < len(line) - 1 and line[first] != top:
        first += 1
    return first


@njit(["void(float32[:, ::1], int64[::1])"], parallel=True, cache=True)
def _argmax(logits, out):  # type: ignore[no-untyped-def]
    for row in prange(len(logits)):
        out[row] = place_of_greatest(logits[row])
