"""Linear interpolation on a rectangular grid, compiled: a search asks tables a hundred thousand times.

Beyond the grid the outermost cell's slope goes on; no result is below zero. Along an axis of one point nothing changes.
"""

from typing import Any

from numba import njit


@njit(cache=True)
def cell(points: Any, x: float) -> Any:
    """The last point but one that is not beyond `x`, the one after it, and how far the way to that is."""
    last = len(points) - 1
    if last == 0:
        return 0, 0, 0.0
    low, high = 0, last
    while high - low > 1:
        middle = (low + high) // 2
        if points[middle] <= x:
            low = middle
        else:
            high = middle
    return low, low + 1, (x - points[low]) / (points[low + 1] - points[low])


@njit(cache=True)
def linear(points: Any, values: Any, x: Any) -> Any:
    """Values over one axis at `x` [n]."""
    found = x.copy()
    for n in range(len(x)):
        i, after, up = cell(points, x[n])
        found[n] = max(values[i] * (1.0 - up) + values[after] * up, 0.0)
    return found


@njit(cache=True)
def bilinear(rows: Any, columns: Any, values: Any, x: Any, y: Any) -> Any:
    """Values at `x` [n] along the rows and `y` [n] along the columns."""
    found = x.copy()
    for n in range(len(x)):
        i, below, up = cell(rows, x[n])
        j, right, along = cell(columns, y[n])
        near = values[i, j] * (1.0 - along) + values[i, right] * along
        far = values[below, j] * (1.0 - along) + values[below, right] * along
        found[n] = max(near * (1.0 - up) + far * up, 0.0)
    return found
