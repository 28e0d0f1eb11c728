"""Linear interpolation as in interpolation.c, which Python loads instead where it was compiled.

The arithmetic is the same, so that results are equal to the last digit. See interpolation.pyi for the arguments.
"""

import numpy as np

from xcore.arrays import Array
from xcore.grid_arrays import bilerp, cells, check_arrays, check_sizes, lerp, positive


def linear(points: Array, values: Array, x: Array, out: Array) -> None:
    """Write the values over one axis at `x` to `out`, which has as many elements."""
    check_arrays((points, values, x, out))
    check_sizes(0 < points.size == values.size and x.size == out.size and out.flags.writeable)
    below, above, fraction = cells(points, x.ravel())
    out.ravel()[:] = positive(lerp(values[below], values[above], fraction))


def linear_at(points: Array, values: Array, x: float) -> float:
    """Return the value over one axis at one place."""
    out = np.empty(1)
    linear(points, values, np.array([x], dtype=np.float64), out)
    return float(out[0])


def bilinear(rows: Array, columns: Array, values: Array, x: Array, y: Array, out: Array) -> None:
    """Write `values` [rows, columns] at `x` along the rows and `y` along the columns to `out` of as many elements."""
    check_arrays((rows, columns, values, x, y, out))
    check_sizes(
        rows.size > 0 < columns.size and values.size == rows.size * columns.size and x.size == y.size == out.size
    )
    out.ravel()[:] = bilerp(values, rows, columns, x.ravel(), y.ravel())


def bilinear_at(rows: Array, columns: Array, values: Array, x: float, y: float) -> float:
    """Return the value of `values` [rows, columns] at one place."""
    out = np.empty(1)
    bilinear(rows, columns, values, np.array([x], dtype=np.float64), np.array([y], dtype=np.float64), out)
    return float(out[0])
