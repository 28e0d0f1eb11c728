"""Tables interpolate exactly on their grid, linearly between, and say when they are asked beyond."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.interpolate import RegularGridInterpolator

from tests.xcore import small_specs
from xcore import document
from xcore.errors import InputError
from xcore.specs.profile import Profile, Table

PROFILE = small_specs.profile()
AXIS = st.lists(st.integers(1, 1000), min_size=2, max_size=6, unique=True).map(sorted)


@given(AXIS, AXIS, st.integers(0, 2**32 - 1))
def test_two_axes_agree_with_scipy_inside_the_grid_and_beyond(xs, ys, seed):
    rng = np.random.default_rng(seed)
    values = 100.0 + rng.random((len(xs), len(ys)))  # far from zero: the floor at zero is tested apart
    table = Table(("batch", "length"), (tuple(xs), tuple(ys)), tuple(values.ravel()))
    oracle = RegularGridInterpolator((xs, ys), values, bounds_error=False, fill_value=None)
    x = rng.uniform(xs[0], xs[-1], 20)
    y = rng.uniform(ys[0], ys[-1], 20)
    assert table(x, y) == pytest.approx(oracle(np.stack([x, y], axis=1)))
    beyond = xs[-1] + (xs[-1] - xs[-2]) / 2
    assert table(beyond, y) == pytest.approx(oracle(np.stack([np.full(20, beyond), y], axis=1)))


@given(AXIS, st.integers(0, 2**32 - 1))
def test_one_axis_goes_through_its_points_and_on_with_the_last_slope(xs, seed):
    values = 100.0 + np.random.default_rng(seed).random(len(xs))
    table = Table(("tokens",), (tuple(xs),), tuple(values))
    assert table(np.array(xs)) == pytest.approx(values)
    slope = (values[-1] - values[-2]) / (xs[-1] - xs[-2])
    assert float(table(xs[-1] + 1)) == pytest.approx(values[-1] + slope)


@given(st.lists(AXIS, min_size=1, max_size=4), st.integers(0, 2**32 - 1))
def test_one_point_is_what_an_array_of_points_gives(axes, seed):
    rng = np.random.default_rng(seed)
    values = rng.random([len(a) for a in axes])
    table = Table(tuple(f"axis{i}" for i in range(len(axes))), tuple(map(tuple, axes)), tuple(values.ravel()))
    for where in rng.uniform(-100, 1200, (5, len(axes))):
        assert table.at(*where) == pytest.approx(float(table(*where)), abs=1e-9)


def test_time_is_never_negative_and_a_single_point_is_constant():
    assert float(Table(("tokens",), ((10.0, 20.0),), (1.0, 5.0))(1)) == 0.0
    assert float(Table(("batch",), ((1.0,),), (0.25,))(99)) == 0.25


def test_covers_is_false_outside_the_grid():
    table = Table(("batch", "length"), ((1.0, 8.0), (16.0, 64.0)), (1.0, 2.0, 3.0, 4.0))
    assert table.covers(np.array([1, 8]), 64)
    assert not table.covers(9, 64)
    assert not table.covers(4, np.array([15, 20]))


@pytest.mark.parametrize(
    ("points", "values", "message"),
    [
        (((1.0, 2.0),), (1.0,), "needs 2 values"),
        (((2.0, 1.0),), (1.0, 2.0), "must increase"),
        (((1.0, float("nan")),), (1.0, 2.0), "must increase"),
        (((1.0, float("inf")),), (1.0, 2.0), "finite"),
        (((float("nan"),),), (1.0,), "must increase"),
        (((1.0, 2.0),), (1.0, float("nan")), "not finite"),
        (((1.0, 2.0),), (1.0, -1.0), "negative"),
    ],
)
def test_a_broken_table_is_refused(points, values, message):
    with pytest.raises(InputError, match=message):
        Table(("tokens",), points, values)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("switch", "profile"),
        ("overhead", "profile"),
        ("head", "degree"),
        ("rest", "layer"),
        ("decode_attention", "layer"),
    ],
)
def test_a_table_of_another_number_of_axes_is_refused(name, where):
    """As in a profile that was edited by hand, instead of a traceback in the midst of a simulation."""
    profile = small_specs.profile(small_specs.schedule("orca").model.spec)
    spec = {"profile": profile, "degree": profile.degrees[0], "layer": profile.degrees[0].decoder}[where]
    cube = Table(("x", "y", "z"), ((1.0,), (1.0,), (1.0,)), (0.0,))
    with pytest.raises(InputError, match=f"table '{name}' has the axes x, y, z: it must have [12]"):
        replace(spec, **{name: cube})


def test_a_value_that_completes_the_rectangle_is_not_covered():
    """3 x 3 points, the last one not measured: its cell isn't covered, but for the edges away from it."""
    table = Table(("batch", "context"), ((1, 2, 4), (1, 2, 4)), tuple(range(1, 10)), filled=(8,))
    assert table.covers(1.5, 3.9) and table.covers(2, 4) and table.covers(4, 2)
    assert table.covers(np.array([1, 4]), np.array([4, 1]))
    assert not table.covers(3, 3) and not table.covers(4, 4) and not table.covers(np.array([1, 3]), np.array([1, 3]))
    assert not table.covers(5, 1)


def test_filled_values_must_exist():
    with pytest.raises(InputError, match="filled values that it does not have"):
        Table(("tokens",), ((1, 2),), (1.0, 2.0), filled=(2,))


def test_a_profile_without_an_engines_pace_keeps_its_fingerprint_and_one_with_it_has_another():
    before = document.to_dict(PROFILE)
    for later in ("in_flight", "front_end_s", "merged_blocks", "layers"):
        del before[later]  # as files from before these fields
    assert document.from_dict(Profile, before, "it") == PROFILE
    assert document.fingerprint(before) == PROFILE.fingerprint
    others = {replace(PROFILE, **change).fingerprint for change in ({"in_flight": 2}, {"front_end_s": 7e-3})}
    assert len(others | {PROFILE.fingerprint}) == 3


@pytest.mark.parametrize("wrong", [{"in_flight": 0}, {"in_flight": 3}, {"front_end_s": -1.0}, {"front_end_s": 61.0}])
def test_a_profile_of_no_engines_pace_is_refused(wrong):
    with pytest.raises(InputError, match="in flight"):
        replace(PROFILE, **wrong)
