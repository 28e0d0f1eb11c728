"""The greatest of many floats, in a form that LLVM turns into vector instructions."""

import numpy as np

from exegpt.kernels.numba_jit import njit

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
