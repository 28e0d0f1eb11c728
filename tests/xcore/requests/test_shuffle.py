"""Shuffling a list of requests within windows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xcore.errors import InputError
from xcore.requests.shuffle import shuffled_places


@given(st.integers(0, 300), st.integers(2, 50), st.integers(0, 5))
def test_each_request_stays_within_its_window(count, window, seed):
    places = shuffled_places([0.0] * count, window, seed)
    assert sorted(places) == list(range(count))
    assert all(place // window == now // window for now, place in enumerate(places))
    assert places == shuffled_places([0.0] * count, window, seed)


def test_a_seed_decides():
    assert shuffled_places([1.0] * 100, 100, 0) != shuffled_places([1.0] * 100, 100, 1)


def test_requests_that_arrive_over_time_keep_their_order():
    with pytest.raises(InputError, match="all arrive at the start"):
        shuffled_places([0.0, 1.0], 2, 0)
