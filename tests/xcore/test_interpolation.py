import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.python_version import python_version
from xcore import interpolation
from xcore.interpolation import bilinear, linear

points = st.lists(st.integers(0, 1000), min_size=1, max_size=9, unique=True).map(lambda p: np.array(sorted(p), float))


@settings(max_examples=100)
@given(points, st.data())
def test_one_axis_is_numpys_within_the_grid_and_goes_on_beyond(grid, data):
    values = data.draw(arrays.arrays(float, len(grid), elements=st.floats(0, 100)))
    x = data.draw(arrays.arrays(float, 5, elements=st.floats(-100, 1100)))
    out = np.empty(5)
    linear(grid, values, x, out)
    first, last = (np.divide(np.diff(values), np.diff(grid))[end] if len(grid) > 1 else 0.0 for end in (0, -1))
    beyond = np.minimum(x - grid[0], 0) * first + np.maximum(x - grid[-1], 0) * last
    np.testing.assert_allclose(out, np.maximum(np.interp(x, grid, values) + beyond, 0), atol=1e-9)


@settings(max_examples=100)
@given(points, points, st.data())
def test_two_axes_are_one_after_the_other(rows, columns, data):
    values = data.draw(arrays.arrays(float, (len(rows), len(columns)), elements=st.floats(0, 100)))
    x, y = (data.draw(arrays.arrays(float, 4, elements=st.floats(grid[0], grid[-1]))) for grid in (rows, columns))
    out = np.empty(4)
    bilinear(rows, columns, values, x, y, out)
    along = np.array([[np.interp(b, columns, row) for row in values] for b in y])
    np.testing.assert_allclose(out, [np.interp(a, rows, v) for a, v in zip(x, along, strict=True)], atol=1e-9)


@pytest.mark.parametrize(
    "arguments",
    [
        (np.zeros(2), np.zeros(2), np.zeros(3)),  # one is missing
        (np.zeros(2), np.zeros(2), np.zeros(3, dtype=np.float32), np.zeros(3)),
        (np.zeros(2), np.zeros(2), [1.0], np.zeros(1)),
        (np.zeros(2), np.zeros(2), np.zeros(6)[::2], np.zeros(3)),
        (np.zeros(2), np.zeros(3), np.zeros(3), np.zeros(3)),
        (np.zeros(2), np.zeros(2), np.zeros(3), np.zeros(4)),
        (np.zeros(0), np.zeros(0), np.zeros(3), np.zeros(3)),
        (np.zeros(2), np.zeros(2), np.zeros(3), np.broadcast_to(0.0, 3)),
    ],
)
def test_arrays_that_do_not_fit_are_refused(arguments):
    with pytest.raises((TypeError, ValueError, BufferError)):
        linear(*arguments)


def test_python_computes_what_is_compiled():
    python, rng = python_version("xcore.interpolation"), np.random.default_rng(0)
    for _ in range(200):
        rows, columns = (np.cumsum(rng.uniform(0.1, 1, n)) for n in rng.integers(1, 6, 2))
        values, (x, y) = rng.uniform(-1, 3, (len(rows), len(columns))), rng.uniform(-1, 6, (2, 9))
        found = []
        for module in (interpolation, python):
            out, along = np.empty((2, 9))
            module.bilinear(rows, columns, values, x, y, out)
            module.linear(rows, values[:, 0].copy(), x, along)
            one = module.bilinear_at(rows, columns, values, x[0], y[0]), module.linear_at(rows, along[: len(rows)], 2.2)
            found.append([*out, *along, *one])
        assert found[0] == found[1]
