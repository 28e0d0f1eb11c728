"""When popularity has drifted: neither steady arrivals nor a burst, but what lasts; and at which rates models are asked
then.
"""

import numpy as np
import pytest

from xmulti.serving.popularity import DAY_S, ENOUGH, FALSE_ALARMS, Popularity

PLANNED = {"chat": 4.0, "code": 0.5}
LASTS_S = 60.0


def fed(popularity, rates, seconds, seed=0, start_s=0):
    """When drift is found, by the second, and the rates; None where it isn't."""
    rng = np.random.default_rng(seed)
    arrivals = {name: rng.poisson(rate, seconds) for name, rate in rates.items()}
    for second in range(seconds):
        now_s = float(start_s + second)
        if found := popularity.come({name: int(counts[second]) for name, counts in arrivals.items()}, now_s):
            return now_s, found
    return None


def test_a_day_at_the_planned_rates_brings_no_search():
    popularity = Popularity(PLANNED, LASTS_S, 0.0)
    assert popularity.threshold_s == pytest.approx(len(PLANNED) * DAY_S / FALSE_ALARMS)
    assert fed(popularity, PLANNED, int(DAY_S)) is None


@pytest.mark.parametrize("seed", range(20))
def test_models_that_swap_are_found(seed):
    """After five minutes of planned rates: within two minutes and the time that it has to last."""
    popularity = Popularity(PLANNED, LASTS_S, 0.0)
    assert fed(popularity, PLANNED, 300, seed) is None
    swapped = {"chat": 0.5, "code": 4.0}
    at_s, rates = fed(popularity, swapped, 400, seed + 100, 300)
    assert at_s - 300 <= 120 + LASTS_S
    assert rates["code"] == pytest.approx(4.0, rel=0.3) and rates["chat"] == pytest.approx(0.5, abs=0.4)
    popularity.restart(rates, at_s)
    assert fed(popularity, rates, 2000, seed, int(at_s) + 1) is None, "against the new rates from then on"


@pytest.mark.parametrize("seed", range(20))
def test_a_burst_is_no_drift(seed):
    popularity = Popularity(PLANNED, LASTS_S, 0.0)
    assert fed(popularity, PLANNED, 100, seed) is None
    assert fed(popularity, {"chat": 100.0, "code": 0.5}, 5, seed, 100) is None
    assert fed(popularity, PLANNED, 600, seed + 100, 105) is None


def test_nothing_is_counted_before_it_begins_nor_while_the_server_is_not_ready():
    popularity = Popularity(PLANNED, LASTS_S, 500.0)
    many = {"chat": 40.0, "code": 5.0}
    assert fed(popularity, many, 500) is None
    at_s, _ = fed(popularity, many, 500, start_s=500)
    assert at_s >= 500 + LASTS_S
    popularity.restart(PLANNED, 1000.0)
    for begin_s in range(1000, 2000, 50):
        assert fed(popularity, many, 50, start_s=begin_s) is None
        popularity.pause(begin_s + 50.0)


def test_models_that_nobody_asks_are_not_planned_for():
    """What comes then is found as ever; at most one time that an alarm lasts has some of both."""
    popularity = Popularity(PLANNED, LASTS_S, 0.0)
    assert fed(popularity, {"chat": 0.02, "code": 0.02}, 5000) is None
    at_s, rates = fed(popularity, {"chat": 0.0, "code": 4.0}, 1000, start_s=5000)
    assert at_s <= 5000 + 120 + 2 * LASTS_S
    assert ENOUGH / LASTS_S <= rates["code"] <= 5.0 and 0 < rates["chat"] < 0.05


def test_models_that_are_rarely_asked_have_the_time_that_their_requests_take():
    """A hundred requests at the planned rates are an hour's."""
    rarely = {"long": 0.02, "longer": 0.01}
    popularity = Popularity(rarely, LASTS_S, 0.0)
    at_s, rates = fed(popularity, {"long": 0.01, "longer": 0.04}, 40_000)
    assert rates["longer"] == pytest.approx(0.04, rel=0.3) and at_s < 20_000


def test_models_that_were_rarely_asked_and_are_asked_often_are_found_as_soon():
    """What is planned says nothing of how long requests take to come that come so often."""
    popularity = Popularity({"long": 0.001, "longer": 0.001}, LASTS_S, 0.0)
    at_s, rates = fed(popularity, {"long": 4.0, "longer": 0.001}, 1000)
    assert at_s <= 20 + LASTS_S and rates["long"] == pytest.approx(4.0, rel=0.3)
