"""Logit edits on the CPU, compiled by numba."""

import numpy as np
from numba import prange

from exegpt.kernels.numba_jit import njit

_MINUS_INFINITY = np.float32(-np.inf)


@njit(
    [
        "void(float32[:, ::1], int64[::1], float32[::1], float32[::1], float32[::1], int64[::1], int64[::1],"
        " int32[:, ::1], uint8[:, ::1], int32[:, ::1])"
    ],
    parallel=True,
    cache=True,
    error_model="numpy",
)
def edit_rows(x, rows, penalty, frequency, presence, slot, mask, allowed, seen, counts):  # type: ignore[no-untyped-def]
    """Apply the mask and the penalties to rows of x [rows, vocab], in place; the rest are `LogitEdits`' arrays."""
    vocab = x.shape[1]
    for i in prange(len(rows)):
        row = x[rows[i]]
        if mask[i] >= 0:
            words = allowed[mask[i]]
            for token in range(vocab):
                allows = (words[token >> 5] >> np.int32(token & 31)) & 1
                if not allows and np.isfinite(row[token]):  # NaN stays, so that the row fails
                    row[token] = _MINUS_INFINITY
        if penalty[i] != 1:
            has = seen[slot[i]]
            for token in range(vocab):
                if has[token]:
                    row[token] = row[token] * penalty[i] if row[token] < 0 else row[token] / penalty[i]
        if frequency[i] != 0 or presence[i] != 0:
            count = counts[slot[i]]
            for token in range(vocab):
                if count[token]:
                    row[token] = row[token] - frequency[i] * np.float32(count[token]) - presence[i]
