"""Drift: found where there is one, not where there is none, whatever ends first."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ks_2samp

from xcore.specs.workload import LengthDistribution, Workload, task
from xrunner.core.drift import LengthDrift, distance, limit

WINDOW = 128


def follow(workload, drawn, at_once=32, seed=0):
    """Requests begin in order, `at_once` of them at a time, and the shortest output ends first; the looks' results."""
    drift, alive, waiting, distances = LengthDrift(workload, WINDOW), {}, list(enumerate(drawn)), []
    while waiting or alive:
        while waiting and len(alive) < at_once:
            index, request = waiting.pop(0)
            alive[index] = request.output
            drift.begin(index)
        soonest = min(alive.values())
        for index in [i for i, left in alive.items() if left == soonest]:
            del alive[index]
            drift.end(index, drawn[index].input, drawn[index].output)
            distances.append(drift.observed())
        alive = {i: left - soonest for i, left in alive.items()}
    return [point for point in distances if point]


@pytest.mark.parametrize("name", ["S", "T", "C1"])
def test_what_was_reckoned_with_is_no_drift(name):
    """Though requests that finished so far had short outputs."""
    assert not any(follow(task(name), task(name).draw(1500, seed=seed)) for seed in range(3))


@pytest.mark.parametrize(("name", "other"), [("S", "T"), ("T", "G"), ("C1", "C2")])
def test_another_task_is(name, other):
    drawn = task(name).draw(400, seed=1) + task(other).draw(400, seed=2)
    drifts = follow(task(name), drawn)
    assert drifts
    assert drifts[-1].output.mean == pytest.approx(task(other).output.mean, rel=0.1)
    assert drifts[-1].input.mean == pytest.approx(task(other).input.mean, rel=0.1)


def test_the_statistic_is_that_of_the_last_test():
    drift, drawn = LengthDrift(task("S"), WINDOW), task("T").draw(WINDOW, seed=4)
    for index, request in enumerate(drawn):
        drift.begin(index)
        drift.end(index, request.input, request.output)
    assert drift.statistic == 0.0
    observed = drift.observed()
    assert observed and drift.statistic == max(
        distance(task("S").input, observed.input), distance(task("S").output, observed.output)
    )


def test_after_a_restart_the_new_lengths_are_reckoned_with():
    drawn = task("T").draw(1200, seed=3)
    drift = LengthDrift(task("S"), WINDOW)
    drifts = []
    for index, request in enumerate(drawn):
        drift.begin(index)
        drift.end(index, request.input, request.output)
        if seen := drift.observed():
            drifts.append(index)
            drift.restart(seen)
    assert drifts == [WINDOW - 1]


def test_cancelled_requests_hold_up_no_others():
    drift = LengthDrift(Workload.fixed(10, 5), 16)
    for index in range(17):
        drift.begin(index)
    for index in range(16, 0, -1):
        drift.end(index, 10, 50)
    assert drift.observed() is None  # the first hasn't ended
    drift.end(0, 10, None)
    assert drift.observed().output.mean == 50


distributions = st.lists(st.integers(1, 40), min_size=1, max_size=60)


@given(distributions, distributions)
def test_the_distance_is_the_two_sample_statistic(sample, other):
    statistic = distance(LengthDistribution.from_samples(sample), LengthDistribution.from_samples(other))
    assert statistic == pytest.approx(ks_2samp(sample, other, method="asymp").statistic)


@settings(max_examples=20)
@given(st.integers(50, 400), st.integers(0, 1000))
def test_the_limit_is_seldom_exceeded_by_chance(samples, seed):
    rng = np.random.default_rng(seed)
    distribution = LengthDistribution.from_samples(np.arange(1, 101))
    far = [distance(distribution, LengthDistribution.from_samples(rng.integers(1, 101, samples))) for _ in range(20)]
    assert np.mean(np.array(far) > limit(samples, 0.05)) <= 0.25  # 0.05 at most, but for the luck of twenty
