"""Matrix products of any shape from a table of measured ones.

The full-speed time of [m, k] by [k, n] is the longer of two: FLOPs at the peak rate, and bytes at the peak bandwidth.
The product's time is this divided by the device's efficiency. Times jump with the shape, but efficiencies change
slowly. So the ratio of measured time to full-speed time is interpolated between the four measured (n, k) around a
shape. That is linear in the logarithms, at each measured m. Beyond the largest measured n or k, the ratio there holds.
"""

from dataclasses import dataclass

import numpy as np

from xcore.arrays import Array


@dataclass(frozen=True)
class Products:
    """Measured matrix products of one dtype."""

    rows: Array
    """[M]: the measured m, increasing."""
    outputs: Array
    """[N]: the measured n, increasing."""
    inputs: Array
    """[K]: the measured k, increasing."""
    ratio: Array
    """[M, N, K]: measured over full-speed time."""
    flops_s: float
    bandwidth_bytes_s: float
    value_bytes: float
    floor_s: float
    """The least time that was measured: the time of a kernel that moves next to nothing."""
    reached_bytes_s: float
    """The highest rate at which weights were read."""

    @staticmethod
    def of(
        m: Array, n: Array, k: Array, seconds: Array, flops_s: float, bandwidth_bytes_s: float, value_bytes: float
    ) -> "Products":
        """Return the products from the columns of a table, [measurements] each.

        If a shape has several times, the shortest counts.
        """
        rows, outputs, inputs = (np.unique(v) for v in (m, n, k))
        best = np.full((len(rows), len(outputs), len(inputs)), np.inf)
        place = (np.searchsorted(rows, m), np.searchsorted(outputs, n), np.searchsorted(inputs, k))
        np.minimum.at(best, place, seconds)
        full = _full_speed(rows[:, None, None], outputs[:, None], inputs, flops_s, bandwidth_bytes_s, value_bytes)
        ratio = _carried(np.where(np.isfinite(best), best / full, np.nan))
        read = (n * k * value_bytes / seconds)[m <= 16]
        return Products(
            rows,
            outputs,
            inputs,
            ratio,
            flops_s,
            bandwidth_bytes_s,
            value_bytes,
            float(seconds.min()),
            float(read.max()),
        )

    def seconds(self, n: float, k: float) -> Array:
        """Return [M] seconds of a product with `n` outputs and `k` inputs at each measured number of rows."""
        full = _full_speed(self.rows, n, k, self.flops_s, self.bandwidth_bytes_s, self.value_bytes)
        (i, up), (j, right) = _between(self.outputs, n), _between(self.inputs, k)
        corner = self.ratio[:, i : i + 2, j : j + 2]
        ratio = (1 - up) * (1 - right) * corner[:, 0, 0] + up * (1 - right) * corner[:, 1, 0]
        return full * (ratio + (1 - up) * right * corner[:, 0, 1] + up * right * corner[:, 1, 1])


def _full_speed(
    m: Array, n: Array | float, k: Array | float, flops_s: float, bandwidth_bytes_s: float, value_bytes: float
) -> Array:
    """Return seconds at the peak rates. The outputs are written in 16 bits for inputs of any dtype."""
    moved = (n * k + m * k) * value_bytes + 2 * m * n
    return np.maximum(2.0 * m * n * k / flops_s, moved / bandwidth_bytes_s)


def _between(points: Array, x: float) -> tuple[int, float]:
    """Return the index of the point below `x`, and `x`'s share of the way to the next, in logarithms; from 0 to 1."""
    i = int(np.clip(np.searchsorted(points, x, side="right") - 1, 0, len(points) - 2))
    share = np.log(x / points[i]) / np.log(points[i + 1] / points[i])
    return i, float(np.clip(share, 0.0, 1.0))


def _carried(ratio: Array) -> Array:
    """Fill shapes that were not measured (the very largest) with the ratio of the nearest smaller k, n or m."""
    for axis in (2, 1, 0):
        line = np.moveaxis(ratio, axis, 0)
        for i in range(1, len(line)):
            line[i] = np.where(np.isnan(line[i]), line[i - 1], line[i])
    return ratio
