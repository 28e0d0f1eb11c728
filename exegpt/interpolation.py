"""Linear interpolation on a rectangular grid, compiled: a search asks tables a hundred thousand times.

Beyond the grid the outermost cell's slope goes on; no result is below zero.
"""

from typing import Any

from numba import guvectorize


@guvectorize(["void(f8[:], f8[:], f8, f8[:])"], "(n),(n),()->()", cache=True)  # type: ignore
def linear(points: Any, values: Any, x: Any, out: Any) -> None:
    """Values at `x` over one axis of two points or more; broadcasts over `x`."""
    low, high = 0, len(points) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if points[middle] <= x:
            low = middle
        else:
            high = middle
    up = (x - points[low]) / (points[low + 1] - points[low])
    out[0] = max(values[low] * (1.0 - up) + values[low + 1] * up, 0.0)


@guvectorize(["void(f8[:], f8[:], f8[:, :], f8, f8, f8[:])"], "(n),(m),(n,m),(),()->()", cache=True)  # type: ignore
def bilinear(rows: Any, columns: Any, values: Any, x: Any, y: Any, out: Any) -> None:
    """Values at `x` along the rows and `y` along the columns, two points or more each; broadcasts over both."""
    low, high = 0, len(rows) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if rows[middle] <= x:
            low = middle
        else:
            high = middle
    left, right = 0, len(columns) - 1
    while right - left > 1:
        middle = (left + right) // 2
        if columns[middle] <= y:
            left = middle
        else:
            right = middle
    up = (x - rows[low]) / (rows[low + 1] - rows[low])
    along = (y - columns[left]) / (columns[left + 1] - columns[left])
    near = values[low, left] * (1.0 - along) + values[low, left + 1] * along
    far = values[low + 1, left] * (1.0 - along) + values[low + 1, left + 1] * along
    out[0] = max(near * (1.0 - up) + far * up, 0.0)
