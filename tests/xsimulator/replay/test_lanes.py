"""Lanes: when each asks the policy, and in what order."""

import itertools
from math import inf
from types import SimpleNamespace

import pytest

from tests.xcore.small_specs import MODEL, schedule
from tests.xsimulator.replay.test_event_simulator import PROFILE, disaggregated
from xcore.batching import BlockPool, Ledger, MicroBatching, Sequence
from xcore.batching.sequence import PREEMPTED
from xcore.orders import fcfs
from xcore.policies.from_schedule import make_policy
from xcore.specs.cluster import parse_cluster
from xcore.specs.schedule import Stage
from xcore.specs.workload import RequestLengths
from xsimulator.cost.cost_model import ReplicaCost
from xsimulator.replay.event_simulator import replay
from xsimulator.replay.lanes import Lane
from xsimulator.replay.record import Record
from xsimulator.replay.replica import Replica


class Watched:
    """A policy's decisions, each with its time and phase."""

    def __init__(self, policy):
        self.policy = policy
        self.decided = []

    def next_step(self, ledger, now, phase="both"):
        step = self.policy.next_step(ledger, now, phase)
        self.decided.append((now, phase, step))
        return step


class Idle:
    def next_step(self, ledger, now, phase="both"):
        return None


def decisions(monkeypatch, plan, requests):
    """What a replay's policy was asked and decided."""
    watched = Watched(make_policy(plan))
    monkeypatch.setattr("xsimulator.replay.replica.make_policy", lambda *_: watched)
    run = replay(plan, PROFILE, requests)
    assert len(run.served) == len(requests)
    return watched.decided, run


def test_one_lane_asks_for_both_phases(monkeypatch):
    decided, _ = decisions(monkeypatch, schedule("orca"), [RequestLengths(20, 5, 0.01 * i) for i in range(9)])
    assert {phase for _, phase, _ in decided} == {"both"}
    assert all(a < b for (a, *_), (b, *_) in itertools.pairwise(decided))


def test_lanes_decide_in_order_of_time_and_encode_first(monkeypatch):
    requests = [RequestLengths(20 + i, 3 + i % 7, 0.004 * i) for i in range(30)]
    decided, _ = decisions(monkeypatch, disaggregated(kv_blocks=12), requests)
    asked = [(now, phase != "encode") for now, phase, _ in decided]
    assert asked == sorted(asked)
    assert {phase for _, phase, _ in decided} == {"encode", "decode"}
    for _, phase, step in decided:
        assert step is None or step.phase == phase


def test_a_lane_that_waits_for_blocks_gets_them_at_the_end_of_the_step_that_frees_them(monkeypatch):
    """Blocks for one request: each starts when the one before finishes, though it arrives at that very time."""
    plan, request = disaggregated(kv_blocks=2), RequestLengths(20, 4)
    freed = replay(plan, PROFILE, [request]).seconds
    for arrival in (0.0, freed):
        decided, run = decisions(monkeypatch, plan, [request, RequestLengths(20, 4, arrival)])
        assert [s.start_s for s in run.served] == [0.0, freed]
        assert [phase for now, phase, _ in decided if now == freed] == ["encode", "decode"]


@pytest.mark.parametrize(("arrival_s", "wakes_s"), [(None, 5.0), (3.0, 3.0), (7.0, 5.0)])
def test_a_lane_without_work_wakes_when_a_preempted_requests_last_token_is_out(arrival_s, wakes_s):
    ledger = Ledger(BlockPool(10, 16), fcfs, admission="grow")
    preempted = Sequence(0, 20, 4)
    preempted.status, preempted.last_token_s, ledger.giving_way.preemptions = PREEMPTED, 5.0, 1
    ledger.submit([preempted] if arrival_s is None else [preempted, Sequence(1, 20, 4, arrival_s)])
    lane = Lane(Idle(), ledger, None, None, "both", None)
    assert not lane.act(1.0, inf)
    assert lane.event[0] == wakes_s


class Preempting:
    """Preempts a sequence whenever it is asked, and has nothing to run."""

    def __init__(self, victim):
        self.victim = victim

    def next_step(self, ledger, now, phase="both"):
        ledger.giving_way.preemptions, ledger.giving_way._preempted = ledger.preemptions + 1, [self.victim]
        ledger.waiting.push(self.victim)


def test_a_preempted_sequence_is_ready_when_its_last_token_is_out():
    """Its blocks are free at once, so that a lane that waits may have something to run."""
    ledger = Ledger(BlockPool(10, 16), fcfs, admission="grow")
    victim = Sequence(0, 20, 4, status=PREEMPTED)
    pipeline = SimpleNamespace(last_token_s=lambda sequence: {0: 5.0}[sequence.index])
    lane = Lane(Preempting(victim), ledger, None, pipeline, "both", None)
    assert lane.act(1.0, inf)
    assert victim.last_token_s == lane.event[0] == 5.0


@pytest.mark.parametrize("plan", [schedule("orca"), disaggregated()], ids=["one lane", "two"])
def test_a_policy_that_decides_nothing_is_an_error(plan, monkeypatch):
    monkeypatch.setattr("xsimulator.replay.replica.make_policy", lambda *_: Idle())
    with pytest.raises(RuntimeError, match="never be admitted"):
        replay(plan, PROFILE, [RequestLengths(20, 4, 1.0)])


@pytest.mark.parametrize("policy", ["orca", "chunked", "static"])
@pytest.mark.parametrize("way", [{}, {"lanes": True}, {"step_by_step": True}])
def test_prompts_alone_do_not_pile_up_before_a_slow_stage(policy, way):
    """The last stage has nearly all layers, and no prompt waits for a token: 2 · 2 - 1 steps are under way."""
    stages = tuple(Stage((i,), 1, "both", None, layers) for i, layers in enumerate([(0, 1), (1, MODEL.layers)]))
    plan = schedule(policy, cluster=parse_cluster("2xA40"), stages=stages)
    served = replay(plan, PROFILE, [RequestLengths(20, 1)] * 80, timeline=False, **way).served
    finishes = [sum(s.finish_s <= step for s in served) for step in sorted({s.start_s for s in served})]
    begun = [sum(s.start_s < step for s in served) for step in sorted({s.start_s for s in served})]
    each = max(begun[1:2])
    assert max(b - f for b, f in zip(begun, finishes, strict=True)) == 2 * each


def test_a_request_that_arrives_during_a_step_waits_for_its_end():
    """The lane that computes isn't woken; one that waits is."""
    plan = schedule("orca")
    cost, batching = ReplicaCost.of(plan, PROFILE), MicroBatching(1)
    replica = Replica(plan, cost, Record(2, batching.index, False), batching)
    assert replica.next_event() == 0.0
    replica.act(0.0)
    replica.submit(Sequence(0, 900, 4, 1.0))
    assert replica.next_event() == 1.0
    replica.act(1.0)
    ends_s = replica.next_event()
    replica.submit(Sequence(1, 20, 4, (1.0 + ends_s) / 2))
    assert 1.0 < ends_s == replica.next_event()
