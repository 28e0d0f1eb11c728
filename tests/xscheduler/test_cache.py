"""Tuning for a cache that is there already: what is found fits it, and is the best that does."""

import pytest

from tests.xscheduler.test_tune import ONE, OPT, ROOFLINE, SHORT
from xscheduler.tune import tune

POLICIES = ("static", "orca", "rra")


def found(method, kv_blocks=None):
    answer = tune(OPT, ONE, SHORT, ROOFLINE, policies=POLICIES, method=method, kv_blocks=kv_blocks)
    return {other.policy: other for other in answer.alternatives}


@pytest.mark.slow
def test_what_is_found_fits_the_cache_and_nothing_that_fits_is_better():
    free, within, every = found("bnb"), found("bnb", 60), found("exhaustive", 60)
    for policy in POLICIES:
        assert within[policy].schedule.kv_blocks <= 60 < free[policy].schedule.kv_blocks
        best = every[policy].estimate.throughput_tok_s
        assert within[policy].estimate.throughput_tok_s == pytest.approx(best, rel=1e-3)
        assert best < free[policy].estimate.throughput_tok_s


def test_a_cache_that_holds_no_sequence():
    assert all(other.schedule is None for other in found("bnb", 1).values())
