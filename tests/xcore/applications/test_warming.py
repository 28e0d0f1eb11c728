"""Policies of warming over any kind of resource: what they keep, from when on, and how long."""

import numpy as np
import pytest

from xcore.applications.demand import ApplicationDemand, ServiceRates
from xcore.applications.demand_graph import END, DemandGraph, DemandStep
from xcore.applications.prewarming import prewarm_at
from xcore.applications.warming import MOST_RECENT, WARMING, DemandWarming, Recent, WarmCall, make_warming

SECONDS = tuple(float(s) for s in range(1, 11))
"""Durations of the search."""


def agent():
    """It thinks; four times in five it then searches and answers."""
    ones = (1,) * 5
    units = (
        DemandStep("think", "llm", ("search",) * 4 + (END,), ones, ones, ones),
        DemandStep("search", "search", ("answer",) * 10, seconds=SECONDS),
        DemandStep("answer", "llm", (END,) * 5, ones, ones, ones),
    )
    return {"agent": ApplicationDemand(DemandGraph(1, "agent", ("think",), units), ServiceRates(0.0, 2.0))}


class Noted:
    """A resource that takes `seconds` to warm up; what is kept, and every change with its time."""

    def __init__(self, seconds=0.0):
        self.seconds, self.kept, self.log = seconds, set(), []

    def warm_up_s(self, call):
        return self.seconds

    def warm(self, call, now):
        self.kept.add(call)
        self.log.append((now, "warm", call.unit))

    def release(self, call, now):
        if call in self.kept:
            self.kept.discard(call)
            self.log.append((now, "release", call.unit))


def call(unit, request=None, run="r"):
    return WarmCall(run, "agent", unit, request)


def run_to(policy, end_s):
    while policy.next_s() <= end_s:
        policy.act(policy.next_s())


def test_the_next_call_of_an_llm_is_found_behind_other_backends():
    model = agent()["agent"]
    ((unit, (probability, seconds)),) = model.next_calls("think", begun=False).items()
    assert unit == "answer" and probability == pytest.approx(0.8, abs=0.05)
    assert set(np.unique(seconds)) == set(SECONDS)
    _, from_start = model.next_calls("think", begun=True)["answer"]
    assert set(np.unique(from_start)) == {s + 2.0 for s in SECONDS}
    assert model.next_calls("answer", begun=False) == {}


@pytest.mark.parametrize("knob", [0.1, 0.4, 0.7])
@pytest.mark.parametrize("seconds", [0.0, 1.5])
def test_prewarming_ends_at_the_knobs_quantile(knob, seconds):
    """Against the rule itself, with the samples of the time until the call."""
    warmth, models = Noted(seconds), agent()
    policy = DemandWarming(warmth, models, knob)
    policy.wait(call("think", 0), 0.0)
    policy.start(call("think", 0), 10.0)
    policy.end(call("think", 0), 12.0)
    probability, samples = models["agent"].next_calls("think", begun=False)["answer"]
    run_to(policy, 12.0 + SECONDS[-1])
    at_s = 12.0 + max(0.0, prewarm_at(samples, -1.0, probability, knob, seconds))
    begun = [entry for entry in warmth.log if entry[1:] == ("warm", "answer")]
    assert begun == [(pytest.approx(at_s), "warm", "answer")] and warmth.kept == {call("answer")}
    policy.wait(call("answer", 1), 20.0)
    assert warmth.kept == {call("answer", 1)}, "the request that came holds it in place of the expected call"
    policy.start(call("answer", 1), 21.0)
    policy.end(call("answer", 1), 22.0)
    assert not warmth.kept and policy.next_s() == np.inf and not policy._runs


def test_an_improbable_call_is_not_warmed_up_and_a_late_one_is_given_up():
    policy = DemandWarming(warmth := Noted(), agent(), 0.9)
    policy.start(call("think", 0), 0.0)
    policy.end(call("think", 0), 2.0)
    assert policy.next_s() == np.inf and warmth.log == [(0.0, "release", "x")][:0]
    policy = DemandWarming(warmth := Noted(), agent(), 0.5)
    policy.wait(call("think", 0), 0.0)
    policy.start(call("think", 0), 0.0)
    policy.end(call("think", 0), 2.0)
    run_to(policy, 100.0)
    assert [entry[1:] for entry in warmth.log[-2:]] == [("warm", "answer"), ("release", "answer")]
    assert warmth.log[-1][0] == pytest.approx(2.0 + 2 * SECONDS[-1] + 1.0) and not warmth.kept and not policy._runs


def test_other_policies_keep_less():
    """LRU nothing, EPWQ what waiting requests need."""
    for name, kept in (("lru", set()), ("epwq", {call("think", 0)}), ("prewarm", {call("think", 0)})):
        policy = make_warming(name, warmth := Noted(), agent())
        policy.wait(call("think", 0), 0.0)
        assert warmth.kept == kept
        policy.start(call("think", 0), 1.0)
        policy.end(call("think", 0), 2.0)
        policy.wait(call("think", 9, "other"), 3.0)
        policy.end(call("think", 9, "other"), 3.5)
        run_to(policy, 3.5)
        assert not {each for each in warmth.kept if each.request is not None}, "also one that ends while it waits"
    assert WARMING == ("lru", "epwq", "prewarm")


def test_parallel_requests_are_one_call():
    policy = DemandWarming(warmth := Noted(), agent(), 0.1)
    for request in (0, 1):
        policy.wait(call("think", request), 0.0)
    policy.start(call("think", 0), 0.0)
    policy.start(call("think", 1), 1.0)
    policy.end(call("think", 0), 2.0)
    assert policy._runs["r"].open_requests == 1
    policy.end(call("think", 1), 3.0)
    run_to(policy, 8.0)
    assert warmth.kept == {call("answer")}


def test_only_the_latest_names_that_clients_choose_are_remembered():
    recent = Recent()
    for number in range(MOST_RECENT + 5):
        recent.remember(number, str(number))
        recent.remember(0, "again")
    assert len(recent) == MOST_RECENT and recent[0] == "again" and 5 not in recent and MOST_RECENT + 4 in recent
