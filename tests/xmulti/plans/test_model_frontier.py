"""Frontiers: what is known isn't searched again, and of the other policies only what may be better."""

import json

import pytest

from xcore.processes import Processes
from xmulti.plans import model_frontier
from xmulti.plans.demands import read_demands
from xmulti.plans.model_frontier import Frontiers, improved, served_on

ONLINE = {"name": "a", "model": "opt-1.3b", "workload": "128/32", "rate": "20/s", "latency_bound": "2s"}
OFFLINE = {"name": "b", "model": "opt-1.3b", "workload": "128/32", "requests": 100}
POLICIES = ("static", "orca", "chunked", "rra")


def demand(path, cluster, **model):
    file = path / "models.yaml"
    file.write_text(json.dumps({"models": [model]}))
    return read_demands(file, cluster)[0]


@pytest.fixture
def searches(monkeypatch):
    """What was searched: numbers of devices, and policies."""
    asked = []

    def counted(demand, devices, policies, floor=0.0):
        asked.append((devices, policies))
        return served_on(demand, devices, policies, floor)

    monkeypatch.setattr(model_frontier, "served_on", counted)
    return asked


@pytest.mark.slow
def test_a_larger_cluster_has_the_same_parts(tmp_path, searches):
    kept = Frontiers()
    two, three = (demand(tmp_path, f"{n}xA40", **ONLINE) for n in (2, 3))
    (before,), (after,) = kept.of([two], ("orca",)), kept.of([three], ("orca",))
    served = [before.on(1), before.on(2)]
    assert [after.on(1), after.on(2)] == served and searches == [(1, ("orca",)), (2, ("orca",))]
    fresh = Frontiers().of([three], ("orca",))[0]
    assert [fresh.on(1), fresh.on(2)] == served, "as if nothing had been known"
    assert after.searched == ((1, served[0]), (2, served[1])) and after.on(3) and len(before.searched) == 2


def test_another_bound_is_another_frontier(tmp_path, searches, monkeypatch):
    monkeypatch.setattr(model_frontier, "REQUESTS", 2000)
    kept, tight = Frontiers(), demand(tmp_path, "1xA40", **ONLINE)
    assert kept.of([tight], ("orca",))[0].on(1) and kept.of([tight.within(4.0)], ("orca",))[0].on(1)
    assert len(searches) == 2


def test_models_that_are_alike_have_one(tmp_path):
    one = demand(tmp_path, "2xA40", **ONLINE)
    other = demand(tmp_path, "2xA40", **ONLINE | {"name": "c", "rate": "5/s"})
    first, second = Frontiers().of([one, other], ("orca",))
    assert first is second


def all_policies(frontier, processes):
    return frontier.with_all_policies([(frontier, 1)], processes)


def test_all_policies_are_searched_once_without_those_that_are_known(tmp_path, searches):
    (frontier,) = Frontiers().of([demand(tmp_path, "1xA40", **ONLINE)], POLICIES, ("orca",))
    with Processes() as processes:
        (served,) = all_policies(frontier, processes)
        assert all_policies(frontier, processes) == [served]
    assert searches == [(1, ("orca",)), (1, ("static", "chunked", "rra"))]
    assert served.goodput_seq_s >= frontier.on(1).goodput_seq_s


@pytest.mark.slow
@pytest.mark.parametrize("bound", ["2s", "700ms", "8s"])
def test_what_is_improved_is_the_best_of_all_policies(bound, tmp_path):
    asked = demand(tmp_path, "1xA40", **ONLINE | {"latency_bound": bound})
    found = improved(asked, 1, POLICIES, served_on(asked, 1, ("orca",)))
    every = {policy: served_on(asked, 1, (policy,)) for policy in POLICIES}
    best = max(served.goodput_seq_s for served in every.values() if served)
    assert found.goodput_seq_s >= 0.98 * best


def test_what_is_done_sooner_is_searched_with_all_policies(tmp_path):
    asked = demand(tmp_path, "1xA40", **OFFLINE)
    assert improved(asked, 1, POLICIES, served_on(asked, 1, ("orca",))) == served_on(asked, 1, POLICIES)
