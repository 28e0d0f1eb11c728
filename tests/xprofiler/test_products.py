"""Matrix products of shapes that were not measured, against shapes that were."""

import numpy as np
import pytest

from xprofiler.products import Products

FLOPS, BANDWIDTH = 3e14, 2e12
GRID = np.array([128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0])


def seconds(m, n, k, efficiency=lambda n, k: 0.6):
    """A device that reaches a share of its full speed."""
    full = np.maximum(2 * m * n * k / FLOPS, (2 * (n * k + m * k) + 2 * m * n) / BANDWIDTH)
    return full / efficiency(n, k)


def products(time, outputs=GRID, inputs=GRID):
    m, n, k = (v.ravel() for v in np.meshgrid([1.0, 16.0, 256.0, 4096.0], outputs, inputs, indexing="ij"))
    return Products.of(m, n, k, time(m, n, k), FLOPS, BANDWIDTH, 2)


def test_measured_shapes_come_back_exactly():
    def bumpy(n, k):
        return 0.3 + 0.2 * np.sin(n) ** 2 + 0.2 * np.cos(k) ** 2

    fitted = products(lambda m, n, k: seconds(m, n, k, bumpy))
    for n, k in ((128.0, 8192.0), (2048.0, 512.0), (8192.0, 8192.0)):
        np.testing.assert_allclose(fitted.seconds(n, k), seconds(fitted.rows, n, k, bumpy))


@pytest.mark.parametrize(("n", "k"), [(700.0, 3000.0), (128.0, 5000.0), (20000.0, 4096.0), (64.0, 64.0)])
def test_a_constant_efficiency_holds_between_the_shapes_and_beyond(n, k):
    fitted = products(seconds)
    np.testing.assert_allclose(fitted.seconds(n, k), seconds(fitted.rows, n, k))


def test_an_efficiency_that_grows_with_the_logarithm_is_followed():
    def growing(n, k):
        return 1 / (3 - np.log2(n * k) / 16)

    fitted = products(lambda m, n, k: seconds(m, n, k, growing))
    np.testing.assert_allclose(fitted.seconds(700.0, 3000.0), seconds(fitted.rows, 700.0, 3000.0, growing), rtol=1e-9)


def test_a_shape_that_is_missing_takes_the_efficiency_of_the_next_smaller():
    m, n, k = (v.ravel() for v in np.meshgrid([1.0, 64.0], GRID, GRID, indexing="ij"))
    time = seconds(m, n, k, lambda n, k: np.where(k == 4096, 0.5, 0.25))
    kept = ~((n == 8192) & (k == 8192))
    fitted = Products.of(m[kept], n[kept], k[kept], time[kept], FLOPS, BANDWIDTH, 2)
    np.testing.assert_allclose(fitted.seconds(8192.0, 8192.0), seconds(fitted.rows, 8192.0, 8192.0, lambda n, k: 0.5))


def test_the_least_and_the_fastest_are_kept():
    fitted = products(seconds)
    assert fitted.floor_s == pytest.approx(seconds(1.0, 128.0, 128.0))
    assert fitted.reached_bytes_s == pytest.approx(0.6 * BANDWIDTH, rel=0.01)
