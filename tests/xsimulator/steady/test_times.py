"""Mixtures of normal distributions: merging kinds keeps their mean and deviation, and impossible kinds don't matter."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from xsimulator.steady.times import Times

KINDS = 20
SECONDS = arrays(np.float64, KINDS, elements=st.floats(0, 10), fill=st.nothing())
SHARES = arrays(np.float64, KINDS, elements=st.sampled_from([0.0, 1e-9, 0.1, 1.0]), fill=st.nothing()).filter(
    lambda p: p.sum() > 0
)


@given(SECONDS, SECONDS, SHARES, st.integers(1, KINDS))
def test_merged_kinds_have_the_mean_and_the_deviation_of_all(seconds, deviation, shares, most):
    times = Times(seconds, deviation, shares / shares.sum())
    merged = times.merged(most)
    assert len(merged.p) <= most
    assert merged.p.sum() == pytest.approx(1.0)
    assert merged.mean == pytest.approx(times.mean)
    assert np.hypot(merged.between, merged.within) == pytest.approx(np.hypot(times.between, times.within), abs=1e-6)


def test_a_kind_without_requests_leaves_no_time_undefined():
    """Kinds far from the usual number of prompts have shares below the smallest number."""
    shares = np.array([0.0, 0.5, *[0.5 / 24] * 24])
    merged = Times(np.arange(26.0), np.zeros(26), shares).merged(12)
    assert np.isfinite(merged.seconds).all() and merged.mean == pytest.approx(np.arange(26.0) @ shares)
