"""Requests that follow others: against replays whose arrivals are fixed, and what of them may overlap."""

import pytest

from tests.xcore.small_specs import profile
from tests.xrunner.cells import schedule
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.workload import RequestLengths
from xsimulator.replay.dependent_requests import After, replay_dependent
from xsimulator.replay.event_simulator import replay

SPEC = builtin_model("opt-1.3b")
PROFILE = profile(SPEC)


def plan(**changes):
    return schedule(SPEC, "chunked", kv_blocks=400, **changes)


def test_independent_requests_are_replayed_as_ever():
    rows = [RequestLengths(10 + 7 * i % 40, 3 + 5 * i % 30, 0.01 * (i // 3)) for i in range(30)]
    alone = replay(plan(), PROFILE, rows, timeline=False, step_by_step=True)
    same = replay_dependent(plan(), PROFILE, rows, [None] * len(rows))
    assert same.served == alone.served and same.seconds == alone.seconds
    assert same.estimate == alone.estimate


def test_a_request_arrives_after_the_end_of_another():
    """The replay of the same requests at the arrivals that resulted gives the same times."""
    rows = [
        RequestLengths(20, 5, 0.0),
        RequestLengths(30, 9, 0.0),
        RequestLengths(8, 4, 0.0),
        RequestLengths(9, 7, 1.0),
    ]
    done = replay_dependent(plan(), PROFILE, rows, [None, After(0, 0.25), After(1, 0.0), None])
    times = {each.index: each for each in done.served}
    assert times[1].arrival_s == pytest.approx(times[0].finish_s + 0.25)
    assert times[2].arrival_s == times[1].finish_s and times[3].arrival_s == 1.0
    fixed = [RequestLengths(row.input, row.output, times[i].arrival_s) for i, row in enumerate(rows)]
    again = {each.index: each for each in replay(plan(), PROFILE, fixed, timeline=False, step_by_step=True).served}
    assert again == times


def test_a_follower_on_another_replica_begins_at_its_arrival_though_a_long_row_of_iterations_is_under_way():
    """Replicas take turns: the follower of the second one's request comes to the first, as if it had arrived there."""
    rows = [RequestLengths(20, 300, 0.0), RequestLengths(20, 5, 0.0), RequestLengths(30, 9, 0.0)]
    twice = plan(replicas=2, cluster=parse_cluster("2xA40"))
    served = replay_dependent(twice, PROFILE, rows, [None, None, After(1, 0.0)]).served
    first, short, follower = sorted(served, key=lambda each: each.index)
    fixed = [rows[0], RequestLengths(30, 9, short.finish_s)]
    alone = replay(plan(), PROFILE, fixed, timeline=False, step_by_step=True).served
    assert follower.finish_s < first.finish_s
    assert sorted((s.start_s, s.first_token_s, s.finish_s) for s in alone) == sorted(
        (s.start_s, s.first_token_s, s.finish_s) for s in (first, follower)
    )
