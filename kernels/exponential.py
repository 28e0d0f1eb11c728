"""The exponential function in a form that LLVM turns into vector instructions (no branch, no call), and sums of it."""

import math

import numpy as np

from exegpt.kernels.numba_jit import njit

_C1, _C2, _C3, _C4, _C5, _C6, _C7 = (np.float32(math.log(2) ** k / math.factorial(k)) for k in range(1, 8))
_LOG2_E = np.float32(1 / math.log(2))
_SUMMED = 1024
"""Number of terms that are added in float32."""


@njit(fastmath=True, error_model="numpy")
def exp(x):  # type: ignore[no-untyped-def]
    """Compute e^x in float32 as 2^i · 2^f, with f in [-½, ½] by its Taylor series.

    The relative error is below 3e-7 for |x| < 1 and below 1e-5 within [-87, 88]. Beyond, the result is the value at the
    border.
    """
    y = min(max(x * _LOG2_E, np.float32(-126)), np.float32(127))
    rounded = np.floor(y + np.float32(0.5))
    f = y - rounded
    power = _C7
    power = power * f + _C6
    power = power * f + _C5
    power = power * f + _C4
    power = power * f + _C3
    power = power * f + _C2
    power = power * f + _C1
    power = power * f + np.float32(1)
    exponent = (np.int32(rounded) + np.int32(127)) << np.int32(23)
    return power * np.int32(exponent).view(np.float32)


@njit(fastmath=True, error_model="numpy")
def mass_of(values, top):  # type: ignore[no-untyped-def]
    """Return the sum of e^(value - top); up to `_SUMMED` terms are added in float32."""
    total = np.float64(0)
    for begin in range(0, len(values), _SUMMED):
        part = np.float32(0)
        for i in range(begin, min(begin + _SUMMED, len(values))):
            part += exp(values[i] - top)
        total += part
    return total
