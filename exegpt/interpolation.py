"""Linear interpolation on a rectangular grid, compiled: a search asks tables a hundred thousand times.

Beyond the grid the outermost cell's slope goes on; no result is below zero.
"""

from typing import Any

from numba import guvectorize, njit


@njit(cache=True)
def _cell(points: Any, x: Any) -> Any:
    """The last of two or more points that is not beyond `x`, but for the very last, and how far the way to the next."""
    low, high = 0, len(points) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if points[middle] <= x:
            low = middle
        else:
            high = middle
    return low, (x - points[low]) / (points[low + 1] - points[low])


@guvectorize(["void(f8[:], f8[:], f8, f8[:])"], "(n),(n),()->()", cache=True)  # type: ignore
def linear(points: Any, values: Any, x: Any, out: Any) -> None:
    """Values at `x` over one axis; broadcasts over `x`."""
    i, up = _cell(points, x)
    out[0] = max(values[i] * (1.0 - up) + values[i + 1] * up, 0.0)


@guvectorize(["void(f8[:], f8[:], f8[:, :], f8, f8, f8[:])"], "(n),(m),(n,m),(),()->()", cache=True)  # type: ignore
def bilinear(rows: Any, columns: Any, values: Any, x: Any, y: Any, out: Any) -> None:
    """Values at `x` along the rows and `y` along the columns; broadcasts over both."""
    i, up = _cell(rows, x)
    j, along = _cell(columns, y)
    near = values[i, j] * (1.0 - along) + values[i, j + 1] * along
    far = values[i + 1, j] * (1.0 - along) + values[i + 1, j + 1] * along
    out[0] = max(near * (1.0 - up) + far * up, 0.0)
