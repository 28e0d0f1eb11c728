"""Goodput: a queue of one server against its recursion, the bounds at the rate found, and the best of candidates."""

import functools
from dataclasses import replace

import numpy as np
import pytest

from exegpt.builtin_models import builtin_model
from exegpt.cluster import parse_cluster
from exegpt.workload import RequestLengths, Workload, task
from tests.exegpt.nouns import profile, schedule
from xprofiler.roofline import roofline_profile
from xscheduler.goodput import REQUESTS, WARM_UP, Arrivals, Bounds, best_of, goodput, served_at, tune_at
from xscheduler.tune import tune
from xsimulator import estimate

OPT = builtin_model("opt-13b")
H100 = parse_cluster("1xH100-SXM")
ROOFLINE = roofline_profile(OPT, H100)
FIXED = Workload.fixed(20, 10)
FEW = 500
ALONE = schedule("orca", workload=FIXED, max_num_seqs=1, bound="p99-queries")
"""One request after the other: a queue with one server and a fixed time of service."""


def waits(arrivals, rate, service):
    """Lindley's recursion: what each request waits."""
    wait, found = 0.0, []
    times = [r.arrival_s / rate for r in arrivals.requests]
    for now, then in zip(times, [*times[1:], 0.0], strict=True):
        found.append(wait)
        wait = max(0.0, wait + service - (then - now))
    return np.array(found)


@functools.cache
def one_server():
    arrivals = Arrivals.poisson(FIXED, None, seed=3, count=FEW)
    return arrivals, served_at(ALONE, profile(), arrivals, 1e-3).latency_p50_s


@pytest.mark.parametrize("load", [0.3, 0.7, 0.9])
def test_waits_are_those_of_a_queue_with_one_server(load):
    arrivals, service = one_server()
    expected = waits(arrivals, load / service, service)[round(WARM_UP * FEW) :] + service
    found = served_at(ALONE, profile(), arrivals, load / service)
    assert found.latency_from == "arrival"
    assert found.latency_p99_s == pytest.approx(np.percentile(expected, 99), rel=1e-3)
    assert found.latency_p50_s == pytest.approx(np.median(expected), rel=1e-3)


def test_goodput_is_where_the_queues_latency_meets_the_bound():
    arrivals, service = one_server()
    bound = 4 * service
    rates = np.linspace(0.3, 0.99, 140) / service
    met = [
        rate
        for rate in rates
        if np.percentile(waits(arrivals, rate, service)[round(WARM_UP * FEW) :], 99) + service <= bound
    ]
    steady = replace(estimate(ALONE, profile()), throughput_seq_s=1 / service)
    for start in (0.1 / service, max(met), 5 / service):
        found = goodput(ALONE, steady, profile(), arrivals, Bounds(bound), start)
        assert found.goodput_seq_s == pytest.approx(max(met), rel=0.02)
        assert "latency" in found.broken
    assert goodput(ALONE, steady, profile(), arrivals, Bounds(0.5 * service), 1.0).goodput_seq_s == 0.0
    assert goodput(ALONE, steady, profile(), arrivals, Bounds(None), 1.0).goodput_seq_s == pytest.approx(1 / service)


def test_every_bound_is_held():
    arrivals, service = one_server()
    found = served_at(ALONE, profile(), arrivals, 0.5 / service)
    for name, figure in (
        ("latency_s", found.latency_s),
        ("ttft_s", found.ttft_p99_s),
        ("tpot_s", found.tpot_p99_s),
    ):
        given = {"latency_s": None, name: figure}
        assert Bounds(**given).broken(found) == ""
        assert "over" in Bounds(**{**given, name: 0.999 * figure}).broken(found)


def test_the_best_candidate_is_the_one_with_the_highest_goodput():
    arrivals, service = one_server()
    bounds = Bounds(3 * service)
    many = [replace(ALONE, max_num_seqs=n) for n in (1, 4)]
    candidates = [(one, estimate(one, profile())) for one in many]
    alone = [goodput(*one, profile(), arrivals, bounds, 1.0).goodput_seq_s for one in candidates]
    best = best_of(candidates, profile(), arrivals, bounds, 1.0)
    assert best.goodput_seq_s == pytest.approx(max(alone), rel=0.02)


def test_a_traces_own_pattern_is_kept():
    rows = [RequestLengths(5, 5, t) for t in (7.0, 4.0, 4.0, 10.0)]
    found = Arrivals.traced(Workload.from_requests("t", rows), None)
    assert [r.arrival_s for r in found.requests] == [0.0, 0.0, 1.5, 3.0]
    assert [r.arrival_s for r in found.at(10.0)] == pytest.approx([0.0, 0.0, 0.15, 0.3])


def test_poisson_arrivals_have_the_asked_rate():
    times = [r.arrival_s for r in Arrivals.poisson(task("T"), 2048).at(8.0)]
    assert REQUESTS / max(times) == pytest.approx(8.0, rel=0.05)


@functools.cache
def answer(rate, bound_s=2.0):
    def search(bound, lowest):
        return tune(
            OPT,
            H100,
            task("S"),
            ROOFLINE,
            latency_bound_s=bound,
            lowest_latency=lowest,
            policies=("orca", "rra"),
        )

    return tune_at(search, ROOFLINE, Arrivals.poisson(task("S"), OPT.context, count=FEW), Bounds(bound_s), rate)


def test_the_answer_keeps_the_bound_at_its_rate_and_its_goodput():
    found = answer(10.0)
    won = found.sustained[found.tuned.schedule.policy]
    assert found.tuned.estimate.latency_from == "arrival"
    assert found.tuned.estimate.throughput_seq_s == pytest.approx(10.0, rel=0.05)
    assert found.tuned.estimate.latency_s <= 2.0 and found.tuned.schedule.latency_bound_s == 2.0
    assert won.goodput_seq_s == found.highest_rate_seq_s >= 10.0
    arrivals = Arrivals.poisson(task("S"), OPT.context, count=FEW)
    assert served_at(won.schedule, ROOFLINE, arrivals, won.goodput_seq_s).latency_s <= 2.0
    assert won.goodput_seq_s <= won.steady.throughput_seq_s
    assert [text for text in found.tuned.assumptions if "counted from" in text] == [
        "bound: of the requests whose outputs are the longest 2%, 95% meet it, counted from arrival"
    ]
    for a in found.tuned.alternatives:
        assert (a.schedule is None) == (found.sustained[a.policy].goodput_seq_s < 9.9)


def test_a_rate_that_nothing_sustains_names_the_highest():
    found = answer(1000.0)
    assert found.tuned.schedule is None
    assert found.highest_rate_seq_s == pytest.approx(answer(10.0).highest_rate_seq_s, rel=0.03)
    assert all("sustains" in a.reason and "at most" in a.reason for a in found.tuned.alternatives)


def test_a_bound_that_is_missed_when_full_may_hold_at_the_rate():
    """RRA's first tokens are late when prompts wait for a full batch's; nearly idle they are not."""

    def search(bound, lowest, **more):
        how = {"latency_bound_s": bound, "lowest_latency": lowest, "policies": ("static",)}
        return tune(OPT, H100, task("S"), ROOFLINE, **how, **more)

    arrivals = Arrivals.poisson(task("S"), OPT.context, count=FEW)
    free = tune_at(search, ROOFLINE, arrivals, Bounds(2.0), 2.0).sustained["static"]
    ttft = served_at(free.schedule, ROOFLINE, arrivals, 2.0).ttft_p99_s * 1.05
    asked = (ROOFLINE, arrivals, Bounds(2.0, ttft_s=ttft), 2.0)

    def narrow(bound, lowest):
        return search(bound, lowest, ttft_s=ttft)

    without = tune_at(narrow, *asked).highest_rate_seq_s
    found = tune_at(narrow, *asked, wider=search)
    assert found.tuned.estimate.ttft_p99_s <= ttft
    assert found.highest_rate_seq_s >= max(without, 2.0)
