"""The schedule for a given list of requests, against the replay of each policy's."""

from dataclasses import replace

import pytest

from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.workload import Workload, task
from xprofiler.roofline import roofline_profile
from xscheduler import shortlist
from xscheduler.ties import TIE
from xscheduler.tune import tune
from xsimulator.replay.event_simulator import replay

MODEL, CLUSTER = builtin_model("opt-13b"), parse_cluster("2xA40")
PROFILE = roofline_profile(MODEL, CLUSTER, overhead_s=2e-3)


@pytest.mark.parametrize("bound_s", [None, pytest.param(12.0, marks=pytest.mark.slow), 9.0])
def test_it_is_the_soonest_of_those_that_hold_the_bound(bound_s):
    requests = task("T").draw(40, seed=3)
    answer = tune(MODEL, CLUSTER, Workload.from_requests("list", requests), PROFILE, latency_bound_s=bound_s)
    chosen = shortlist.best_by_replay(answer, PROFILE, requests)
    runs = {a.policy: replay(a.schedule, PROFILE, requests) for a in answer.alternatives if a.schedule}
    fastest = runs[chosen.schedule.policy]
    late = {policy: max(0.0, run.estimate.latency_s - (bound_s or float("inf"))) for policy, run in runs.items()}
    assert late[chosen.schedule.policy] == min(late.values())
    soonest = min(run.seconds for policy, run in runs.items() if late[policy] == min(late.values()))
    assert fastest.seconds <= soonest / (1 - TIE)  # of those as good, the simplest policy's
    assert chosen.estimate is next(a.estimate for a in answer.alternatives if a.schedule is chosen.schedule)


def test_a_long_list_is_left_to_the_steady_state(monkeypatch):
    requests = task("T").draw(20, seed=3)
    answer = tune(MODEL, CLUSTER, task("T"), PROFILE, policies=("static", "orca"))
    monkeypatch.setattr(shortlist, "MOST", 19)
    assert shortlist.best_by_replay(answer, PROFILE, requests) is answer
    nothing = replace(answer, schedule=None)
    assert shortlist.best_by_replay(nothing, PROFILE, requests[:5]) is nothing
