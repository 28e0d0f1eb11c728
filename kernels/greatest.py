"""The greatest of many floats, in a form that LLVM turns into vector instructions."""

import numpy as np
from numba import njit

_LEAST = np.int32(-(2**31))
_SIGN, _REST = np.int32(31), np.int32(2**31 - 1)


@njit(error_model="numpy")
def greatest(values):  # type: ignore[no-untyped-def]
    """The greatest of a contiguous float32 array.

    Compared as integers, whose order is that of the floats once a negative one's other bits are flipped: unlike a
    maximum of floats it needs no rule for what is not a number (which counts as the greatest), so it vectorises.
    """
    bits = values.view(np.int32)
    top = _LEAST
    for i in range(len(bits)):
        top = max(top, np.int32(bits[i] ^ ((bits[i] >> _SIGN) & _REST)))
    return np.int32(top ^ ((top >> _SIGN) & _REST)).view(np.float32)
