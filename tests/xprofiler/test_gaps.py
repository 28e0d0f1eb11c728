"""Grids with gaps: what is measured stays, what lies between is linear, what lies beyond is named."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from xprofiler.gaps import bridge, gridded, table

POINTS = ((1.0, 2.0, 4.0, 8.0), (0.0, 1.0, 3.0, 7.0, 10.0))


@given(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=12))
def test_gaps_within_a_plane_are_bridged_exactly_and_the_rest_stays(missing):
    """A plane is linear along every axis, so whichever axis bridges a gap gives the plane's value."""
    x, y = np.meshgrid(*POINTS, indexing="ij")
    plane = 3.0 + 2.0 * x + 5.0 * y
    holes = plane.copy()
    for at in missing:
        holes[at] = np.nan
    filled = bridge(POINTS, holes)
    known = ~np.isnan(filled)
    np.testing.assert_allclose(filled[known], plane[known])
    assert known[~np.isnan(holes)].all()
    for row, column in missing:  # a gap between two measured neighbours never stays
        line = ~np.isnan(holes[row])
        if line[:column].any() and line[column + 1 :].any():
            assert known[row, column]


def test_the_nearest_neighbours_bridge():
    """Along the row the neighbours are three steps apart, along the column two: the column decides."""
    values = np.array([[0.0, 10.0, 0.0, 0.0], [0.0, np.nan, np.nan, 9.0], [0.0, 30.0, 0.0, 0.0]])
    assert bridge(((0.0, 1.0, 2.0), (0.0, 1.0, 2.0, 3.0)), values)[1, 1] == 20.0


def test_what_no_measurement_brackets_is_named_as_filled():
    points = ((1.0, 2.0), (1.0, 2.0))
    values = gridded(points, {(1.0, 1.0): 1.0, (1.0, 2.0): 2.0, (2.0, 1.0): 3.0})
    bridged = table(("a", "b"), points, bridge(points, values), np.full((2, 2), 9.0))
    assert bridged.values == (1.0, 2.0, 3.0, 9.0)
    assert bridged.filled == (3,) and bridged.covers(1.5, 1.0) and not bridged.covers(1.5, 1.5)
