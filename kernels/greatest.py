"""The greatest of many floats, in a form that LLVM turns into vector instructions."""

import numpy as np

from exegpt.kernels.bfloat16 import widened
from exegpt.kernels.numba_jit import njit

_SIGN_16, _REST_16 = np.int16(15), np.int16(2**15 - 1)
_MINUS_INFINITY_16 = np.int16(np.uint16(0xFF80).view(np.int16) ^ _REST_16)
_LEAST, _MOST = np.int32(-(2**31)), np.int32(2**31 - 1)
_SIGN, _REST = np.int32(31), _MOST
_MINUS_INFINITY = np.int32(np.float32(-np.inf).view(np.int32) ^ _REST)
"""The integer that stands for minus infinity; NaNs with a sign lie below it."""


@njit(error_model="numpy")
def greatest(values):  # type: ignore[no-untyped-def]
    """Return the greatest value of a contiguous float32 array; NaN if any value is NaN.

    Values are compared as integers, which have the order of the floats once the other bits of negative values are
    flipped. An integer maximum needs no rule for NaN, so it vectorises. As integers, NaNs lie beyond the infinities. So
    a compiler that assumes that there are no NaNs can't drop the test.
    """
    bits = values.view(np.int32)
    top, bottom = _LEAST, _MOST
    for i in range(len(bits)):
        ordered = np.int32(bits[i] ^ ((bits[i] >> _SIGN) & _REST))
        top, bottom = max(top, ordered), min(bottom, ordered)
    if bottom < _MINUS_INFINITY:
        return np.float32(np.nan)
    return np.int32(top ^ ((top >> _SIGN) & _REST)).view(np.float32)


@njit(error_model="numpy")
def greatest_bfloat16(values):  # type: ignore[no-untyped-def]
    """Return the greatest value of a contiguous array of bfloat16, which is uint16, as `greatest` does."""
    bits = values.view(np.int16)
    top, bottom = np.int16(-(2**15)), _REST_16
    for i in range(len(bits)):
        ordered = np.int16(bits[i] ^ ((bits[i] >> _SIGN_16) & _REST_16))
        top, bottom = max(top, ordered), min(bottom, ordered)
    if bottom < _MINUS_INFINITY_16:
        return np.float32(np.nan)
    return widened(np.uint16(top ^ ((top >> _SIGN_16) & _REST_16)))
