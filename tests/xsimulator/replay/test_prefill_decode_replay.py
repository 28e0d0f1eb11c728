"""Prefill replicas before decode replicas: by hand, by the loop in Python, and against invariants."""

from dataclasses import replace
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.xcore.small_specs import MODEL, schedule
from tests.xsimulator.replay.test_compiled import PROFILE, arrays
from tests.xsimulator.replay.test_event_simulator import stages_of
from xcore.specs.cluster import parse_cluster
from xcore.specs.prefill_decode import PrefillDecode
from xcore.specs.workload import RequestLengths
from xscheduler.goodput import missed_bounds
from xsimulator.replay import compiled
from xsimulator.replay.compiled import Replicas
from xsimulator.replay.prefill_decode_replay import KVLink, hand_over
from xsimulator.replay.watch import Watch

NAMES = ("started", "first", "finished", "hits", "reused", "preemptions")
ONE = stages_of(MODEL, "both", 0, 1)
ROWS = st.lists(
    st.builds(RequestLengths, st.integers(1, 90), st.integers(1, 40), st.floats(0, 2)), min_size=1, max_size=30
)


def received(rows):
    requests = arrays(sorted(rows, key=lambda row: row.arrival_s))
    return replace(requests, received=requests.inputs - 1)


@given(rows=ROWS, admission=st.sampled_from(["reserve", "grow"]), blocks=st.integers(9, 40))
@settings(max_examples=30)
def test_the_loop_in_python_gives_the_same_times(rows, admission, blocks):
    plan, requests = schedule("chunked", stages=ONE, admission=admission, kv_blocks=blocks), received(rows)
    fast = Replicas(PROFILE).serve(plan, requests)
    with mock.patch.object(compiled, "COMPILED", False):
        slow = Replicas(PROFILE).serve(plan, requests)
    for name in NAMES:
        assert getattr(fast, name).tolist() == pytest.approx(getattr(slow, name).tolist(), rel=1e-9)


def test_received_prompts_take_blocks_but_no_prefill():
    """All are admitted at once where the cache holds them, and one after the other where it holds one."""
    rows = [RequestLengths(60, 20)] * 4
    whole = Replicas(PROFILE).serve(schedule("chunked", stages=ONE, kv_blocks=20), received(rows))
    one = Replicas(PROFILE).serve(schedule("chunked", stages=ONE, kv_blocks=5), received(rows))
    usual = Replicas(PROFILE).serve(schedule("chunked", stages=ONE, kv_blocks=20), arrays(rows))
    assert (whole.started == whole.started[0]).all() and (whole.first < usual.first).all()
    assert one.started.tolist() == pytest.approx([0.0, *one.finished[:-1]])


def plan_of(x, y, **variables):
    sides = [replace(schedule("chunked", stages=ONE, **variables), replicas=count) for count in (x, y)]
    return PrefillDecode(*sides)


def test_one_request_is_prefilled_sent_and_decoded():
    plan, replicas = plan_of(1, 1), Replicas(PROFILE)
    requests = arrays([RequestLengths(50, 9, 1.0)])
    times = hand_over(plan, PROFILE, replicas, requests)
    prefilled = replicas.serve(plan.prefill, arrays([RequestLengths(50, 1, 1.0)])).finished[0]
    link = KVLink.of(plan, PROFILE)
    sent = MODEL.layers * MODEL.kv_bytes(1, plan.prefill.kv_dtype) * 50
    assert link.token_bytes * 50 == sent and times.ready[0] == pytest.approx(prefilled + link.seconds.at(sent))
    alone = replicas.serve(plan.decode, received([RequestLengths(50, 9, float(times.ready[0]))]))
    assert times.first[0] == pytest.approx(alone.first[0]) and times.finished[0] == pytest.approx(alone.finished[0])


@given(rows=ROWS, x=st.integers(1, 3), y=st.integers(1, 3))
@settings(max_examples=30)
def test_every_request_is_served_in_order_of_its_steps(rows, x, y):
    requests = arrays(sorted(rows, key=lambda row: row.arrival_s))
    times = hand_over(plan_of(x, y), PROFILE, Replicas(PROFILE), requests)
    steps = requests.arrivals, times.started, times.prefilled, times.ready, times.first, times.finished
    for before, after in pairwise(steps):
        assert (after >= before - 1e-12).all()
    assert ((times.finished > times.first) == (requests.outputs > 1)).all() and all(0 < b <= 1 for b in times.busy)


BOUNDS = st.one_of(st.just(np.inf), st.floats(1e-3, 3))


@given(
    rows=ROWS,
    counts=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    limits=st.tuples(BOUNDS, BOUNDS, BOUNDS),
    allowed=st.integers(0, 9),
    front_end=st.sampled_from([0.0, 13e-3]),
)
@settings(max_examples=200)
def test_a_replay_ends_early_only_if_too_many_requests_miss_a_bound(rows, counts, limits, allowed, front_end):
    profile, plan = replace(PROFILE, front_end_s=front_end), plan_of(*counts)
    requests = arrays(sorted(rows, key=lambda row: row.arrival_s))
    requests = replace(requests, flags=requests.flags * (np.arange(len(rows)) % 4 > 0))
    watch = Watch(np.array(limits), np.full(3, float(allowed)), np.zeros(3))
    times = hand_over(plan, profile, Replicas(profile), requests)
    watched = hand_over(plan, profile, Replicas(profile), requests, watch)
    missed = [counts.sum() for counts in missed_bounds(requests, times.first, times.finished, watch.limits)]
    event(f"early: {watched is None}, missed: {max(missed) > allowed}")
    if watched is None:
        assert max(missed) > allowed
    else:
        for name in ("started", "ready", "first", "finished"):
            assert getattr(watched, name).tolist() == getattr(times, name).tolist()


def test_a_replay_ends_where_a_side_is_late():
    """On the way to the decode replica, on it, and before it."""
    requests, plan, replicas = arrays([RequestLengths(50, 9, 0.0)] * 3), plan_of(1, 1), Replicas(PROFILE)
    times = hand_over(plan, PROFILE, replicas, requests)
    for bound, seconds in enumerate((times.prefilled, times.finished - times.first, times.ready)):
        for late, share in ((True, 0.9), (False, 1.1)):
            limits = np.full(3, np.inf)
            limits[bound] = share * seconds.max() / (8 if bound == 1 else 1) + (not late) * times.finished.max()
            watch = Watch(limits, np.zeros(3), np.zeros(3))
            assert (hand_over(plan, PROFILE, replicas, requests, watch) is None) == late


def test_a_replica_for_each_request_makes_none_wait():
    rows = [RequestLengths(40, 10, 0.0)] * 3
    alone = hand_over(plan_of(1, 1), PROFILE, Replicas(PROFILE), arrays(rows[:1]))
    each = hand_over(plan_of(3, 3), PROFILE, Replicas(PROFILE), arrays(rows))
    assert each.finished.tolist() == pytest.approx([alone.finished[0]] * 3)
    together = hand_over(plan_of(1, 3), PROFILE, Replicas(PROFILE), arrays(rows))
    assert (np.sort(together.finished)[1:] >= alone.finished[0]).all()


def test_keys_and_values_go_between_nodes_where_no_node_holds_all_replicas():
    """Three replicas of a device each, on a node of four devices and on nodes of two."""
    profile = replace(PROFILE, send_between_nodes=replace(PROFILE.send, values=(1.0, 2.0)))
    for devices_per_node, table in ((4, profile.send), (2, profile.send_between_nodes)):
        cluster = replace(parse_cluster("4xA40"), devices_per_node=devices_per_node)
        assert KVLink.of(plan_of(1, 2, cluster=cluster), profile).seconds == table
