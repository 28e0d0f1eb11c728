"""Linear interpolation on a rectangular grid, compiled (interpolation.c).

Beyond the grid, the outermost cell's slope continues; no result is below zero. An axis of one point is constant. All
arrays are float64 and contiguous.
"""

from xcore.arrays import Array

def linear(points: Array, values: Array, x: Array, out: Array) -> None:
    """Write the values over one axis at `x` to `out`, which has as many elements."""

def linear_at(points: Array, values: Array, x: float) -> float:
    """Return the value over one axis at one place."""

def bilinear(rows: Array, columns: Array, values: Array, x: Array, y: Array, out: Array) -> None:
    """Write `values` [rows, columns] at `x` along the rows and `y` along the columns to `out` of as many elements."""

def bilinear_at(rows: Array, columns: Array, values: Array, x: float, y: float) -> float:
    """Return the value of `values` [rows, columns] at one place."""
