"""Linear interpolation on a rectangular grid, compiled (interpolation.c).

Beyond the grid the outermost cell's slope goes on; no result is below zero. Along an axis of one point nothing changes.
All arrays are float64 and contiguous.
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

def linear(points: Array, values: Array, x: Array, out: Array) -> None:
    """Values over one axis at `x`, into `out` of as many elements."""

def linear_at(points: Array, values: Array, x: float) -> float:
    """The value over one axis at one place."""

def bilinear(rows: Array, columns: Array, values: Array, x: Array, y: Array, out: Array) -> None:
    """`values` [rows, columns] at `x` along the rows and `y` along the columns, into `out` of as many elements."""

def bilinear_at(rows: Array, columns: Array, values: Array, x: float, y: float) -> float:
    """The value of `values` [rows, columns] at one place."""
