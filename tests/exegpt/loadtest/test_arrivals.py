"""Arrivals: their statistics, by seed."""

import math

import numpy as np
import pytest

from xcore.errors import InputError
from xcore.traces.arrivals import parse_rates, random_arrivals, random_arrivals_until, trace_arrivals

NUM = 200_000


@pytest.mark.parametrize(
    ("rate", "burstiness"), [(5.0, 1.0), (200.0, 1.0), (5.0, 0.25), (5.0, 4.0), (0.1, 1.0), (5.0, 0.05)]
)
@pytest.mark.parametrize("seed", [0, 7])
def test_gaps_have_the_mean_and_the_variation_of_their_distribution(rate, burstiness, seed):
    """Mean 1/rate and CV 1/sqrt(burstiness), each within four standard errors; the share of gaps below the mean is the
    Gamma distribution's.
    """
    from scipy.stats import gamma

    gaps = np.diff(random_arrivals(rate, NUM, (seed,), burstiness))
    assert (gaps >= 0).all()
    cv = 1 / math.sqrt(burstiness)
    assert gaps.mean() * rate == pytest.approx(1.0, abs=4 * cv / math.sqrt(NUM))
    kurtosis = 3 + 6 / burstiness
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=4 * math.sqrt((kurtosis + 3) / (4 * NUM)))
    share = gamma.cdf(1 / rate, burstiness, scale=1 / (rate * burstiness))
    assert (gaps < 1 / rate).mean() == pytest.approx(share, abs=4 * 0.5 / math.sqrt(NUM))


def test_gaps_are_independent_and_begin_at_zero():
    arrivals = random_arrivals(5.0, NUM, (1,))
    gaps = np.diff(arrivals)
    assert arrivals[0] == 0.0
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 4 / math.sqrt(NUM)


def test_seeds_decide():
    assert (random_arrivals(5.0, 50, (1, 2)) == random_arrivals(5.0, 50, (1, 2))).all()
    assert (random_arrivals(5.0, 50, (1, 2)) != random_arrivals(5.0, 50, (1, 3)))[1:].all()


def test_the_extremes_are_all_at_once_and_evenly_spaced():
    assert random_arrivals(math.inf, 3, (0,)).tolist() == [0.0, 0.0, 0.0]
    assert random_arrivals(4.0, 3, (0,), math.inf).tolist() == [0.0, 0.25, 0.5]


@pytest.mark.parametrize("burstiness", [1.0, 0.001, math.inf])
def test_a_duration_has_the_arrivals_before_its_end(burstiness):
    arrivals = random_arrivals_until(20.0, 50.0, (3,), burstiness)
    assert arrivals[-1] < 20.0
    longer = random_arrivals_until(40.0, 50.0, (3,), burstiness)
    assert (longer[longer < 20.0] == arrivals).all() and len(longer) > len(arrivals)
    with pytest.raises(InputError, match="shorten --duration"):
        random_arrivals_until(1e9, 50.0, (3,))


def test_a_traces_arrivals_keep_their_pattern_at_another_rate():
    assert trace_arrivals([7.0, 5.0, 5.5], None).tolist() == [0.0, 0.5, 2.0]
    stretched = trace_arrivals([7.0, 5.0, 5.5], 4.0)
    assert stretched.tolist() == [0.0, 0.125, 0.5]  # two gaps in half a second
    with pytest.raises(InputError, match="no arrivals"):
        trace_arrivals([0.0, 0.0], None)


def test_rates_are_a_list():
    assert parse_rates("5/s, 90/m,inf") == (5.0, 1.5, math.inf)
    for wrong in ("5", "", "5/s,", "-1/s", "0/s"):
        with pytest.raises(InputError, match="not an arrival rate"):
            parse_rates(wrong)
