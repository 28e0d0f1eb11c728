"""Log-probabilities on the CPU, compiled by numba: a row is read once for its sum and once for its likeliest tokens."""

import numpy as np
from numba import prange

from exegpt.kernels.exponential import mass_of
from exegpt.kernels.greatest import greatest
from exegpt.kernels.numba_jit import njit

_CHUNK = 64
"""Logits that are skipped together if none of them is among the likeliest."""


@njit(error_model="numpy")
def _likeliest(x, most):  # type: ignore[no-untyped-def]
    """Return the places of the `most` greatest values of x, the greatest first; equal values in their order."""
    places, count = np.empty(most, np.int64), 0
    for begin in range(0, len(x) if most else 0, _CHUNK):
        end = min(begin + _CHUNK, len(x))
        if count == most and greatest(x[begin:end]) <= x[places[most - 1]]:
            continue
        for place in range(begin, end):
            if count == most and x[place] <= x[places[most - 1]]:
                continue
            count = min(count + 1, most)
            i = count - 1
            while i > 0 and x[places[i - 1]] < x[place]:
                places[i] = places[i - 1]
                i -= 1
            places[i] = place
    return places


@njit(
    ["void(float32[:, ::1], int64[::1], int64[::1], float64[:, ::1])"], parallel=True, cache=True, error_model="numpy"
)
def log_probs_rows(logits, rows, tokens, out):  # type: ignore[no-untyped-def]
    """Write `log_probs` of these rows of logits [rows, vocab], with the token of each row, to out [n, 1 + 2·most]."""
    most = (out.shape[1] - 1) // 2
    for i in prange(len(rows)):
        x = logits[rows[i]]
        top = greatest(x)
        total = np.float64(top) + np.log(mass_of(x, top)) if np.isfinite(top) else np.nan
        out[i, 0] = x[tokens[rows[i]]] - total
        places = _likeliest(x, most)
        for j in range(most):
            out[i, 1 + j] = x[places[j]] - total
            out[i, 1 + most + j] = places[j]
