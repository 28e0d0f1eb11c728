"""Arrays by the type of their elements."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Floats32 = NDArray[np.float32]
Integers = NDArray[np.int64]
Integers32 = NDArray[np.int32]
Places = NDArray[np.intp]
"""Indices of elements."""
Numbers = Array | Floats32 | Integers | Integers32
"""Numbers of any of these types."""
