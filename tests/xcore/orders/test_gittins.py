"""The Gittins rank on samples: its definition by brute force, its golden values, and what an order makes of it."""

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xcore.batching import Sequence
from xcore.orders.gittins import Gittins, RankedDemand, gittins_rank

SAMPLES = st.lists(st.integers(1, 60), min_size=1, max_size=12)


def defined(samples, attained):
    """Eq. 1 as it is written, over all budgets at which the quotient can be least, and some between."""
    residuals = [x - attained for x in samples if x > attained]
    budgets = residuals + [d * share for d in residuals for share in (0.3, 0.7, 1.4)]
    quotients = []
    for budget in budgets:
        finish = sum(d <= budget for d in residuals) / len(residuals)
        if finish:
            quotients.append(statistics.fmean(min(d, budget) for d in residuals) / finish)
    return min(quotients)


@given(SAMPLES, st.integers(0, 59))
def test_it_is_the_infimum_of_the_definition(samples, attained):
    if max(samples) > attained:
        assert gittins_rank(sorted(samples), attained) == pytest.approx(defined(samples, attained))


def test_golden_values():
    """The published code drops the budget that unfinished jobs use up, and gives 2.25 for the first."""
    assert gittins_rank([1, 2, 10], 0) == pytest.approx(2.5)
    assert gittins_rank([1, 2, 10], 1) == pytest.approx(2.0)
    assert gittins_rank([1, 2, 10], 2) == pytest.approx(8.0)
    assert gittins_rank([7.0], 3.0) == pytest.approx(4.0)


@pytest.mark.parametrize(("attained", "rank"), [(10, 10), (12, 8), (19.5, 0.5), (20, 20), (41, 39)])
def test_beyond_every_sample_the_last_is_doubled(attained, rank):
    assert gittins_rank([1, 2, 10], attained) == pytest.approx(rank)


@given(SAMPLES, st.floats(0.01, 1e9))
def test_no_job_that_has_begun_ranks_at_nothing(samples, attained):
    assert gittins_rank(sorted(samples), attained) > 0


def test_ranks_are_refreshed_at_the_boundaries_of_ten_buckets():
    demand = RankedDemand([float(x) for x in range(101)])
    ranks = {attained: demand.rank(attained) for attained in (20.0, 21.0, 29.9, 30.0, 31.0)}
    assert ranks[20.0] == ranks[21.0] == ranks[29.9] == gittins_rank(demand.samples, 20.0)
    assert ranks[30.0] == ranks[31.0] == gittins_rank(demand.samples, 30.0) != ranks[20.0]


def test_a_known_demand_ranks_by_what_remains():
    demand = RankedDemand([5.0, 5.0])
    assert (demand.rank(0.0), demand.rank(3.1), demand.rank(6.0)) == (5.0, 2.0, 4.0)
    assert demand.most == demand.mean == 5.0


def test_the_least_sample_that_is_still_possible():
    demand = RankedDemand([10.0, 1.0, 2.0])
    assert [demand.next_sample(a) for a in (0.0, 1.0, 5.0, 10.0)] == [1.0, 2.0, 10.0, 10.0]


def test_the_order_prefers_likely_early_ends_to_lower_means():
    """Half of the first job's runs end at once: it goes first, though its mean is higher."""
    demands = {0: RankedDemand([1.0, 60.0]), 1: RankedDemand([20.0, 20.0])}
    attained = {0: 0.0, 1: 0.0}
    order = Gittins(lambda s: demands[s.index], lambda s: attained[s.index])
    first, second = (Sequence(index, 10, 10) for index in range(2))
    assert order.changes and demands[0].mean > demands[1].mean
    assert order.key(first, 0.0) < order.key(second, 0.0)
    attained[0] = 30.0  # it has not ended early
    assert order.key(second, 0.0) < order.key(first, 0.0)


def mean_completion(jobs, chosen):
    """Preemptive service in units of 1, the job of the lowest rank first."""
    done, now, attained = [], 0, [0] * len(jobs)
    left = set(range(len(jobs)))
    while left:
        job = min(left, key=lambda j: (chosen(j, attained[j]), j))
        attained[job] += 1
        now += 1
        if attained[job] == jobs[job]:
            left.remove(job)
            done.append(now)
    return statistics.fmean(done)


def test_it_completes_sooner_than_the_lowest_mean_first():
    """Over 300 draws of four jobs of unknown sizes: the policy's optimality is in expectation."""
    drawn = random.Random(0)
    kinds = [[1, 1, 1, 30], [8, 8, 8, 8], [2, 2, 20, 20], [5, 6, 7, 12]]
    means = [statistics.fmean(kind) for kind in kinds]
    gittins, srpt = [], []
    for _ in range(300):
        jobs = [drawn.choice(kind) for kind in kinds]
        gittins.append(mean_completion(jobs, lambda j, a: gittins_rank(kinds[j], a)))
        srpt.append(mean_completion(jobs, lambda j, a: means[j] - a))
    assert statistics.fmean(gittins) < 0.95 * statistics.fmean(srpt)
