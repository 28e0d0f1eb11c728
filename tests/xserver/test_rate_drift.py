"""Whether a rate has drifted: the statistic by its definition, its false alarms, and how soon it finds a drift."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xmulti.serving.rate_drift import CHANGED, TOLERATED, RateDrift

TICKS = st.lists(st.tuples(st.integers(0, 12), st.floats(0.2, 3.0)), min_size=1, max_size=12)


def by_definition(ticks, planned):
    """The mean over both sides of the sum, over all ticks at whose beginning the rate may have changed, of likelihood
    ratios of what has come since, times the tick's length.
    """
    sides = []
    for sign in (1, -1):
        near, changed = planned * TOLERATED**sign, planned * CHANGED**sign
        ratios = [(changed / near) ** count * math.exp(-(changed - near) * seconds) for count, seconds in ticks]
        sides.append(sum(ticks[start][1] * math.prod(ratios[start:]) for start in range(len(ticks))))
    return sum(sides) / 2


def after(ticks, planned):
    test = RateDrift(planned)
    for count, seconds in ticks:
        test.come(count, seconds)
    return test


@given(TICKS, st.floats(0.05, 20.0))
def test_the_statistic_is_its_definition(ticks, planned):
    assert after(ticks, planned).statistic_s == pytest.approx(by_definition(ticks, planned), rel=1e-9)


@given(TICKS, st.floats(0.05, 10.0), st.floats(-1.0, 1.0))
def test_it_grows_by_no_more_than_time_at_rates_that_are_tolerated(ticks, planned, place):
    """Its mean after one more second, over all numbers of Poisson arrivals: Ville's inequality needs no more."""
    rate, before = planned * TOLERATED**place, after(ticks, planned).statistic_s
    chances = [math.exp(n * math.log(rate) - rate - math.lgamma(n + 1)) for n in range(150)]
    mean = sum(p * after([*ticks, (n, 1.0)], planned).statistic_s for n, p in enumerate(chances))
    assert mean <= (before + 1.0) * (1 + 1e-9)


@given(TICKS, st.floats(0.5, 10.0))
def test_it_grows_by_more_at_a_doubled_rate(ticks, planned):
    """Nearly all of it is of the side that a doubled rate is on."""
    crowded = [(count + math.ceil(3 * planned * seconds), seconds) for count, seconds in ticks]
    before = after(crowded, planned)
    chances = [math.exp(n * math.log(2 * planned) - 2 * planned - math.lgamma(n + 1)) for n in range(200)]
    mean = sum(p * after([*crowded, (n, 1.0)], planned).statistic_s for n, p in enumerate(chances))
    assert before.side == "higher" and mean > before.statistic_s


def crossing(planned, rate, threshold_s, seconds, seed):
    """When the statistic exceeds the threshold under Poisson arrivals, looked at every second; None: not in time."""
    test = RateDrift(planned)
    for second, count in enumerate(np.random.default_rng(seed).poisson(rate, seconds), 1):
        test.come(int(count), 1.0)
        if test.statistic_s >= threshold_s:
            return second
    return None


@pytest.mark.parametrize("times", [1 / TOLERATED, 1.0, TOLERATED])
def test_false_alarms_are_as_rare_as_they_are_said_to_be(times):
    """One in ten runs at most; of 150, three standard deviations more."""
    seconds, chance, runs = 1000, 0.1, 150
    alarms = [crossing(2.0, 2.0 * times, seconds / chance, seconds, seed) for seed in range(runs)]
    found = sum(alarm is not None for alarm in alarms)
    assert found <= chance * runs + 3 * math.sqrt(runs * chance * (1 - chance))


@pytest.mark.parametrize("planned", [0.3, 2.0, 20.0])
@pytest.mark.parametrize(("times", "within"), [(2.0, 200), (4.0, 40), (0.5, 600), (0.0, 80)])
def test_what_has_changed_is_found_in_time(planned, times, within):
    """In so many planned requests' time, in 99 of 100 cases: of 200 at most 6 are later, but for a chance of 1 in 200.
    The threshold is that of two models.
    """
    seconds = math.ceil(within / planned)
    late = sum(crossing(planned, times * planned, 2 * 86400 / 0.01, seconds, seed) is None for seed in range(200))
    assert late <= 6


def test_no_number_is_too_large():
    test = after([(10_000, 1.0)] * 10, 0.01)
    assert test.statistic_s == math.inf and test.side == "higher"
    assert after([(0, 1e6)] * 3, 5.0).side == "lower"
