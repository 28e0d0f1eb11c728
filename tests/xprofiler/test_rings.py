"""Rings: steps, shares of bandwidth and protocols give the times, and all-reduces are two passes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xprofiler.rings import PROTOCOLS, ring_all_gather_s, ring_all_reduce_s

RATE = 20e9
LL, SIMPLE = PROTOCOLS


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_a_small_message_takes_the_steps_of_the_protocol_with_flags(devices):
    steps = 2 * (devices - 1)
    assert ring_all_reduce_s(0.0, devices, RATE) == pytest.approx(LL.first_s + steps * LL.step_s)
    assert ring_all_gather_s(0.0, devices, RATE) == pytest.approx(LL.first_s + steps / 2 * LL.step_s)


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_a_large_message_takes_its_bytes_over_the_shared_bandwidth(devices):
    size = 2.0**32
    assert ring_all_reduce_s(size, devices, RATE) == pytest.approx(2 * (devices - 1) / devices * size / RATE, rel=1e-3)
    slower = ring_all_reduce_s(size, devices, RATE / 2) / ring_all_reduce_s(size, devices, RATE)
    assert slower == pytest.approx(2.0, rel=1e-3)


@given(st.floats(1, 1e10), st.floats(1, 1e10), st.sampled_from([2, 3, 4, 8]))
def test_more_bytes_take_longer_and_never_longer_for_each(a, b, devices):
    few, many = sorted((a, b))
    assert ring_all_reduce_s(few, devices, RATE) <= ring_all_reduce_s(many, devices, RATE)
    per_byte = [ring_all_reduce_s(size, devices, RATE) / size for size in (few, many)]
    assert per_byte[1] <= per_byte[0] * (1 + 1e-9)
