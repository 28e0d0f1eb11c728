"""Greedy sampling: the index of the greatest logit."""

import math
from collections.abc import Callable

import numpy as np
import torch
from numba import prange

from exegpt.kernels.bfloat16 import widened
from exegpt.kernels.greatest import greatest, greatest_bfloat16
from exegpt.kernels.kernel_dtypes import Values, array_of
from exegpt.kernels.numba_jit import njit
from exegpt.kernels.numba_threads import compiled

NO_TOKEN = -1
"""The token of a row from which none can be chosen: a logit is NaN or has overflowed, or all are ruled out."""

_CHUNK = 512
"""Number of logits that are compared together."""


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the index of every row's greatest value, or `NO_TOKEN`: [rows, vocab] → int64 [rows].

    Of several equal values the first counts.
    """
    if not compiled(logits):
        return argmax_reference(logits)
    out = torch.empty(len(logits), dtype=torch.int64)
    kernel = _argmax_bfloat16 if logits.dtype == torch.bfloat16 else _argmax
    kernel(array_of(logits.contiguous()), out.numpy())
    return out


def argmax_reference(logits: torch.Tensor) -> torch.Tensor:
    """Compute `argmax` in plain PyTorch."""
    top, place = logits.max(dim=-1)  # NaN if any value is
    return place.where(top.isfinite(), NO_TOKEN)


def _place_finder(greatest: Callable[[Values], np.float32]) -> Callable[[Values], int]:
    """Compile the function line → index of its greatest value, the first of equals, or `NO_TOKEN`."""

    @njit
    def place_of(line):  # type: ignore[no-untyped-def]
        # The greatest of each chunk in vector registers, then its place within the winning chunk.
        top, first = np.float32(-math.inf), 0
        for start in range(0, len(line), _CHUNK):
            value = greatest(line[start : start + _CHUNK])
            if not value < math.inf:
                return NO_TOKEN
            if value > top:
                top, first = value, start
        if top == -math.inf:
            return NO_TOKEN
        while first < len(line) - 1 and widened(line[first]) != top:
            first += 1
        return first

    place: Callable[[Values], int] = place_of
    return place


place_of_greatest, _place_in_bfloat16 = _place_finder(greatest), _place_finder(greatest_bfloat16)


@njit(["void(float32[:, ::1], int64[::1])"], parallel=True, cache=True)
def _argmax(logits, out):  # type: ignore[no-untyped-def]
    for row in prange(len(logits)):
        out[row] = place_of_greatest(logits[row])


@njit(["void(uint16[:, ::1], int64[::1])"], parallel=True, cache=True)
def _argmax_bfloat16(logits, out):  # type: ignore[no-untyped-def]
    for row in prange(len(logits)):
        out[row] = _place_in_bfloat16(logits[row])
