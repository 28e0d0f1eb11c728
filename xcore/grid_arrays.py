"""Checks of arrays and interpolation on a grid, for the Python versions of compiled modules."""

from collections.abc import Sequence

import numpy as np

from xcore.arrays import Array, Integers, Places


def check_arrays(
    arrays: Sequence[Array | Integers | Places], kind: type[np.float64 | np.int64 | np.intp] = np.float64
) -> None:
    """Raise TypeError or BufferError unless all are contiguous arrays of this kind."""
    for array in arrays:
        if not isinstance(array, np.ndarray) or array.dtype != kind:
            raise TypeError(f"expected an array of {np.dtype(kind)}")
        if not array.flags.c_contiguous:
            raise BufferError("expected a contiguous array")


def check_sizes(condition: bool) -> None:
    """Raise ValueError unless the sizes of arrays fit together."""
    if not condition:
        raise ValueError("sizes don't fit together")


def bilerp(values: Array, rows: Array, columns: Array, x: Array, y: Array) -> Array:
    """Return `values` [rows, columns] at places [n]; never negative."""
    grid = values.reshape(rows.size, columns.size)
    near, far, down = cells(rows, x)
    left, right, across = cells(columns, y)
    along_near = lerp(grid[near, left], grid[near, right], across)
    along_far = lerp(grid[far, left], grid[far, right], across)
    return positive(lerp(along_near, along_far, down))


def lerp_rows(points: Array, values: Array, x: Array) -> Array:
    """Return the rows of `values` [points, columns] at places [n]: [n, columns]; never negative."""
    below, above, fraction = cells(points, x)
    return positive(lerp(values[below], values[above], fraction[:, None]))


def cells(points: Array, x: Array) -> tuple[Places, Places, Array]:
    """Return the points before and after each value, and its share of the way between them."""
    if points.size == 1:
        zero = np.zeros(x.size, dtype=np.intp)
        return zero, zero, np.zeros(x.size)
    below = np.clip(np.searchsorted(points, x, side="right") - 1, 0, points.size - 2)
    return below, below + 1, (x - points[below]) / (points[below + 1] - points[below])


def lerp(below: Array, above: Array, fraction: Array) -> Array:
    """Return the values at these shares of the way from `below` to `above`."""
    return below * (1.0 - fraction) + above * fraction


def positive(values: Array) -> Array:
    """Return the values, with 0 for negative ones and NaN."""
    return np.where(values > 0.0, values, 0.0)
