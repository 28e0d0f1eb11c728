"""Tuning at a rate of arrival: which policies are looked at closely, and what is said of each."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tests.xcore.small_specs import schedule
from tests.xscheduler.test_goodput import answer
from xcore.errors import InputError
from xcore.specs.bound import ALL_REQUESTS, PAPER_BOUND
from xcore.specs.estimate import Estimate
from xscheduler import open_tune
from xscheduler.goodput import LEAST_LOAD, Goodput, RateBounds
from xscheduler.open_search import COUNTS, PATIENCE
from xscheduler.open_tune import (
    MOST_EXHAUSTIVE,
    Sustained,
    _alternative,
    _assumptions,
    _best_divided,
    _check_method,
    _cost,
    _raced,
    _sustained,
)
from xscheduler.rate_sample import REQUESTS, Arrivals
from xscheduler.tuned import Alternative

MADE = schedule("orca")
ESTIMATE = Estimate(10.0, 100.0, 1.5, 1.0, 1.5, 0.2, 0.05, 0.5, 0.1)


class Racing:
    """A policy's search whose grid leads with one goodput, and which comes to another when it is refined."""

    def __init__(self, grid, refined=None, profile="profile", spaces=1):
        self.members = range(spaces)
        self.meter = SimpleNamespace(profile=profile)
        self.leads = [] if grid is None else [SimpleNamespace(goodput=grid), SimpleNamespace(goodput=grid / 2)]
        self.closer = [] if refined is None else [SimpleNamespace(goodput=refined)]
        self.floor, self.looked_closer = None, False

    def grid(self, floor):
        self.floor = floor
        return self.leads

    def refined(self, leads):
        assert leads is self.leads
        self.looked_closer = True
        return self.closer


@pytest.fixture
def measured(monkeypatch):
    """A measurement confirms the leads' goodput; returns it with the leads and the number of requests."""

    def best(leads, search, count):
        return SimpleNamespace(goodput_seq_s=leads[0].goodput, leads=len(leads), count=count)

    monkeypatch.setattr(open_tune, "_best", best)
    monkeypatch.setattr(open_tune, "engine_of", lambda profile: SimpleNamespace(name=profile))


def raced(searches, progress, floor=0.0, **options):
    """Race policies whose experts are divided in one way."""
    found = _raced({(policy, 0): search for policy, search in searches.items()}, progress, floor, **options)
    return {policy: best for (policy, _), best in found.items()}


def test_policies_far_behind_are_not_looked_at_closely_nor_with_all_requests(measured):
    searches = {
        "last": Racing(0.88, 9.0),
        "none": Racing(None),
        "near": Racing(0.94, 0.995),
        "best": Racing(0.96, 1.0),
        "fair": Racing(0.935, 0.985),
    }
    told = []
    found = raced(searches, lambda *at: told.append(at))
    assert {policy: (each.goodput_seq_s, each.count) for policy, each in found.items()} == {
        "best": (1.0, REQUESTS),
        "near": (0.995, REQUESTS),
        "fair": (0.985, COUNTS[1]),
        "last": (0.88, COUNTS[1]),
    }
    assert found["last"].leads == 1 and not searches["last"].looked_closer
    assert told == [(number, 10) for number in (*range(1, 6), *range(7, 11))]
    assert {search.floor for search in searches.values()} == {0.0}


def test_policies_far_behind_a_floor_are_left_out(measured):
    searches = {"far": Racing(0.92, 0.92), "near": Racing(0.935, 0.98), "gone": Racing(0.95, None)}
    found = raced(searches, lambda *at: None, 1.0)
    assert list(found) == ["near"] and found["near"].count == COUNTS[1]
    assert {search.floor for search in searches.values()} == {0.93}


def test_policies_on_the_engine_are_only_compared_with_one_another(measured):
    searches = {
        "paper's": Racing(2.0, 2.0, "own"),
        "slow": Racing(0.9, 0.9, "own"),
        "best on it": Racing(1.0, 1.0, "engine"),
        "near on it": Racing(0.94, 0.985, "engine"),
    }
    found = raced(searches, lambda *at: None, profile="engine")
    assert [policy for policy, search in searches.items() if not search.looked_closer] == ["slow"]
    counts = {policy: each.count for policy, each in found.items()}
    assert counts == {"paper's": REQUESTS, "slow": COUNTS[1], "best on it": REQUESTS, "near on it": COUNTS[1]}


def test_a_division_of_the_experts_is_only_looked_at_above_the_same_policys_best(measured):
    searches = {
        ("orca", 0): Racing(0.9),
        ("orca", 1): Racing(1.0, 1.0),
        ("chunked", 0): Racing(0.97, 0.99),
        ("chunked", 1): Racing(None),
        ("rra", 0): Racing(0.5, spaces=PATIENCE + 1),
        ("rra", 1): Racing(0.6),
    }
    found = _raced(searches, lambda *at: None)
    assert {key: search.floor for key, search in searches.items()} == {
        ("orca", 1): 0.0,
        ("chunked", 1): 0.0,
        ("orca", 0): 0.93,
        ("chunked", 0): 0.0,
        ("rra", 1): 0.0,
        ("rra", 0): 0.0,  # of many spaces, the first ones may be far behind the best
    }
    assert not searches["orca", 0].looked_closer and found["orca", 1].count == found["chunked", 0].count == REQUESTS


def test_each_policy_keeps_its_best_division(measured):
    divided = {"orca": ["parts", "whole"], "chunked": ["parts", "whole"], "rra": ["parts", "whole"]}
    best = {
        key: SimpleNamespace(goodput_seq_s=rate)
        for key, rate in {("orca", 0): 1.0, ("orca", 1): 2.0, ("chunked", 0): 2.0, ("chunked", 1): 2.0}.items()
    }
    searches, sustained = _best_divided(divided, best)
    assert searches == {"orca": "whole", "chunked": "parts", "rra": "parts"}
    assert sustained == {"orca": best["orca", 1], "chunked": best["chunked", 0]}


class Late:
    """A meter under which requests are late from some rate on; remembers the rates that it was asked for."""

    def __init__(self, late_from, limit=100.0):
        self.seen, self._limit = [], limit
        self.bounds = SimpleNamespace(
            latency_s=2.0, ttft_s=None, tpot_s=0.1, broken=lambda rate: f"late at {rate:g}" if rate > late_from else ""
        )

    def limit(self, steady):
        return self._limit

    def served_at(self, made, rate, count):
        assert made is MADE and count == COUNTS[1]
        self.seen.append(pytest.approx(rate))
        return rate


@pytest.mark.parametrize(
    ("reached", "late_from", "limit", "rates", "broken"),
    [
        ((1.0, 1.0), 1.0, 100.0, [1.02], "late at 1.02"),
        ((0.9, 1.0), 1.03, 100.0, [1.02, 1.05], "late at 1.05"),
        ((1.0, 1.0), 1.2, 100.0, [1.02, 1.05, 1.1], ""),
        ((1.0, 1.0), 0.0, 1.0, [], ""),  # as much as it ever gives
        ((0.0, 0.0), 0.5, 100.0, [LEAST_LOAD * 50], "late at 1"),  # late even when it is nearly idle
    ],
)
def test_what_breaks_is_seen_a_little_above_the_goodput(reached, late_from, limit, rates, broken):
    lead = SimpleNamespace(schedule=MADE, steady=50.0)
    meter = Late(late_from, limit)
    search = SimpleNamespace(meter=meter, steady=lambda lead: ("steady", (8, 1)))
    found = _sustained(lead, Goodput(*reached), search)
    assert found.broken == broken and found.goodput_seq_s == reached[0]
    assert rates == meter.seen
    assert found.schedule == replace(MADE, latency_bound_s=2.0, tpot_bound_s=0.1) and found.steady == ("steady", (8, 1))


STEADY = replace(ESTIMATE, memory_bytes=(3e9,), binding="memory", extrapolated=("head",))


@pytest.mark.parametrize(
    ("low", "broken", "reason", "binding"),
    [
        (2.5, "", "sustains 2.5/s; above this rate, its steady throughput is reached, limited by memory", "memory"),
        (2.0, "it is late", "sustains 2/s; above this rate, it is late", "latency"),
        (1.99, "it is late", "sustains at most 1.99/s; above this rate, it is late", None),
        (0.0, "it is late", "sustains no rate: even at the lowest rate, it is late", None),
    ],
)
def test_a_policy_is_served_at_a_rate_that_it_sustains(low, broken, reason, binding):
    asked = []
    meter = SimpleNamespace(served_at=lambda *at: asked.append(at) or ESTIMATE)
    best = Sustained(MADE, STEADY, Goodput(low, 3.0), broken)
    found = _alternative(SimpleNamespace(members=[], problem=None, meter=meter), best, 2.0, 500, "orca")
    assert (found.policy, found.reason) == ("orca", reason)
    if binding is None:
        assert found.schedule is found.estimate is None and not asked
    else:
        assert found.schedule is MADE and asked == [(MADE, 2.0, 500)]
        assert found.estimate == replace(STEADY, binding=binding)


def test_a_policy_that_sustains_nothing_is_late_or_does_not_fit(monkeypatch):
    monkeypatch.setattr(open_tune, "why_infeasible", lambda policy, members, problem: f"{policy} is too large")

    def reason(*ceilings):
        search = SimpleNamespace(members=[SimpleNamespace(ceiling=ceiling) for ceiling in ceilings], problem=None)
        return _alternative(search, None, 2.0, 0, "rra").reason

    assert reason(0.0, 0.5) == "sustains no rate: its requests are late even at the lowest rate"
    assert reason(0.0) == "rra is too large"


def arrivals(count, random):
    ones = np.full(count, 5.0)
    return Arrivals(ones, ones, np.arange(float(count)), random)


def test_what_was_assumed_is_said():
    few = _assumptions(RateBounds(2.0), PAPER_BOUND, arrivals(499, True), 1234.56, None)
    assert few == (
        "bound: it holds for 95% of the requests with the longest 2% of outputs, counted from the arrival",
        "arrivals: 1,234.56/s in an open system, so latency counts from the arrival; the figures come from the event "
        "simulator over 499 requests, without the first 10%; with so few requests, percentiles are unreliable: pass a "
        "longer trace",
        "goodput: the highest rate within all bounds, to 0.25%, with a margin of 1.5 standard errors",
    )
    winner = Alternative("orca", replace(MADE, replicas=2), replace(ESTIMATE, extrapolated=("head", "rest")), "")
    trace = _assumptions(RateBounds(None, tpot_s=0.1), ALL_REQUESTS, arrivals(500, False), 2.0, winner)
    assert trace[0].endswith("over 500 requests, without the first 10%")
    assert trace[1:] == (
        "goodput: the highest rate within all bounds, to 0.25%; no bound limits a growing queue, so it is at most the "
        "steady throughput",
        "the answer uses times beyond the profile's grid in head, rest: "
        "they are extrapolated linearly and less certain",
    )


def test_only_few_schedules_are_all_replayed():
    _check_method("exhaustive", MOST_EXHAUSTIVE)
    _check_method("bnb", 10 * MOST_EXHAUSTIVE)
    with pytest.raises(InputError, match="would replay 20,001 schedules, more than 20,000"):
        _check_method("exhaustive", MOST_EXHAUSTIVE + 1)


@pytest.mark.parametrize(("method", "name"), [("bnb", "racing"), ("exhaustive", "exhaustive")])
def test_the_cost_is_that_of_all_policies(method, name):
    counts = ((3, 10, 3), (4, 20, 4))
    searches = [SimpleNamespace(points=p, size=s, meter=SimpleNamespace(replays=r)) for p, s, r in counts]
    cost = _cost(searches, method, 1.5)
    assert (cost.method, cost.evaluations, cost.space, cost.seconds, cost.replays) == (name, 7, 30, 1.5, 7)


def test_without_a_rate_the_answer_is_for_a_server_that_is_well_used():
    few = {"prefills_per_step": 1, "max_num_seqs": 16}
    found = answer(None, RateBounds(5.0), fixed=few, count=1500)
    assert found.rate_seq_s == pytest.approx(0.8 * found.highest_rate_seq_s) and found.rate_seq_s > 0
    assert found.tuned.schedule.control.max_num_seqs == 16
    none = answer(None, RateBounds(1e-3), fixed=few, count=1500)
    assert none.rate_seq_s == none.highest_rate_seq_s == 0.0 and none.tuned.schedule is None
    assert none.tuned.lowest_latency_s == found.tuned.lowest_latency_s > 1e-3
