"""Ties: the simpler policy of those that are as good."""

from dataclasses import replace

import pytest

from tests.xcore.small_specs import profile, schedule
from xcore.policies import TRAITS, Traits
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.workload import Workload
from xprofiler.roofline import roofline_profile
from xscheduler.spaces import POLICIES
from xscheduler.ties import TIE, preferred
from xscheduler.tune import tune
from xsimulator import estimate


def prefer(values):
    return preferred(values.items(), lambda item: item[1], lambda item: item[0])[0]


def test_every_policy_has_its_place():
    assert set(POLICIES) == set(TRAITS)
    assert sorted(traits.complexity for traits in TRAITS.values()) == list(range(len(POLICIES)))


def test_the_simpler_of_two_that_are_as_good_is_the_answer():
    assert prefer({"static": 100.0, "rra": 100.0, "orca": 99.95}) == "orca"
    assert prefer({"static": 100.0, "rra": 99.4}) == "static"
    assert prefer({"waa-c": 100.0, "chunked": 100.0 * (1 - 1.01 * TIE)}) == "waa-c"


def test_nothing_is_preferred_of_nothing():
    assert preferred([], lambda x: x, lambda x: x) is None


@pytest.mark.parametrize("order", [("static", "orca", "chunked"), ("chunked", "orca", "static")])
def test_tune_prefers_the_simpler_policy_whatever_the_order(order):
    """One request at a time, of one token: all policies do the same, and are as good."""
    model, cluster = builtin_model("opt-13b"), parse_cluster("1xH100-SXM")
    workload = Workload.fixed(100, 1)
    found = tune(model, cluster, workload, roofline_profile(model, cluster), policies=order, most_resident=1)
    rates = {a.policy: a.estimate.throughput_seq_s for a in found.alternatives}
    as_good = [policy for policy, rate in rates.items() if rate >= max(rates.values()) * (1 - TIE)]
    assert len(as_good) > 1
    assert found.schedule.policy == min(as_good, key=lambda policy: TRAITS[policy].complexity)
    best = next(a for a in found.alternatives if a.policy == found.schedule.policy)
    assert best.estimate == found.estimate and best.reason.startswith("the best")


def test_a_short_list_prefers_the_simpler_policy_too():
    from xcore.specs.workload import RequestLengths
    from xscheduler.search import Search
    from xscheduler.shortlist import best_by_replay
    from xscheduler.tuned import Alternative, Tuned

    alone = [
        schedule("static", encode_batch=1),
        schedule("orca", max_num_seqs=1, prefills_per_step=1),
    ]
    requests = [RequestLengths(50, 1)] * 8
    made = tuple(Alternative(s.policy, s, estimate(s, profile()), "") for s in alone)
    tuned = Tuned(made[0].schedule, made[0].estimate, made, Search("bnb", 1, 1, 0.0), None, ())
    assert best_by_replay(tuned, profile(), requests).schedule.policy == "orca"
    slower = replace(made[1], schedule=schedule("static", encode_batch=1))
    assert (
        best_by_replay(replace(tuned, alternatives=(made[0], slower)), profile(), requests).schedule.policy == "static"
    )


def test_a_policy_of_somebody_elses_comes_last(monkeypatch):
    mine = Traits(name="mine", what="", control=TRAITS["orca"].control)
    monkeypatch.setitem(TRAITS, "mine", mine)
    assert prefer({"mine": 1.001, "waa-m": 1.0}) == "waa-m"
    assert prefer({"mine": 1.0}) == "mine"
