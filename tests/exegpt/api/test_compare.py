"""Runs beside their predictions: the machine's speed during a run."""

import pytest

from exegpt.api.compare import slowdown_between
from xcore.specs.slowdown import Slowdown


def test_the_speed_during_a_run_is_the_mean_of_those_before_and_after():
    between = slowdown_between(Slowdown(1.0, 2.0, 1.0, 4.0), Slowdown(4.0, 2.0, 0.25, 1.0))
    assert between and between.factors == pytest.approx((2.0, 2.0, 0.5, 2.0))
    assert slowdown_between(None, Slowdown()) is None and slowdown_between(Slowdown(), None) is None
