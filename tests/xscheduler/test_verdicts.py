"""Verdicts on adjusted batches: where one decides on another schedule, a replay of that schedule is the same."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.xcore.small_specs import MODEL, schedule
from tests.xsimulator.replay.test_event_simulator import PROFILE, REQUESTS, plans, stages_of
from xcore.specs.cluster import parse_cluster
from xcore.specs.workload import Workload
from xscheduler.goodput import Meter, RateBounds, Verdict
from xscheduler.rate_sample import Arrivals
from xsimulator.replay.compiled import Replicas, RequestArrays
from xsimulator.replay.watch import Watch

ADJUSTABLE = ("rra", "waa-c", "waa-m")
SHARES = st.sampled_from([0.02, 0.1, 0.4])


def served(made, tables, requests):
    """The times of requests, and the verdict on a replay of all of them."""
    rows = sorted(requests, key=lambda r: r.arrival_s)
    columns = np.array([(r.arrival_s, r.input, r.output, 0.0) for r in rows], dtype=np.float64)
    watch = Watch.nothing()
    times = Replicas(tables).serve(made, RequestArrays(*np.ascontiguousarray(columns.T)), watch)
    return times, Verdict(made, 1.0, True, *watch.used.tolist())


def with_batches(made, batch, target):
    """The schedule with another batch and another target."""
    return replace(made, control=replace(made.control.with_batch(batch), decode_batch=target))


@settings(max_examples=300, deadline=None)
@given(plans(policies=ADJUSTABLE), REQUESTS, SHARES, *[st.integers(1, 80)] * 4, st.booleans())
def test_a_verdict_decides_only_on_batches_that_serve_alike(
    plan, requests, share, batch, target, other, targeted, less
):
    """Batches, targets and blocks differ; requests come alone or in bursts that fill a batch."""
    made, tables = plan
    made = with_batches(replace(made, adjust=share), batch, target)
    times, verdict = served(made, tables, requests)
    blocks = int(verdict.blocks) if less else made.kv_blocks
    another = with_batches(replace(made, kv_blocks=blocks), other, targeted)
    decided = verdict.decides(another, 1.0)
    event(f"decided: {decided}, same batch: {batch == other}")
    if decided:
        again, _ = served(another, tables, requests)
        for name in ("started", "first", "finished", "busy"):
            assert getattr(again, name).tolist() == getattr(times, name).tolist(), name


def test_batches_of_which_a_quarter_is_never_filled_are_replayed_once():
    """Batches of 77 and more choose all of 20 candidates, whatever their lengths; one of 76 may leave one out."""
    seen = Verdict(with_batches(schedule("rra", adjust=0.05), 100, 9), 1.0, False, 20.0, 5.0, 20.0)
    batches = (1, 20, 76, 77, 100, 400)
    answers = [seen.decides(with_batches(seen.schedule, batch, 3), 1.0) for batch in batches]
    assert answers == [False, False, False, True, True, True]
    fewer = replace(seen, schedule=with_batches(seen.schedule, 70, 9))
    assert not fewer.decides(seen.schedule, 1.0), "that batch was chosen among its candidates"
    assert fewer.decides(fewer.schedule, 1.0) and not fewer.decides(fewer.schedule, 0.9)


@pytest.mark.parametrize("policy", ["rra", "waa-c"])
def test_a_meter_replays_adjusted_batches_that_choose_all_once(policy):
    workload, stages = Workload.fixed(30, 8), stages_of(MODEL, "both", 0, 1)
    if policy != "rra":
        stages = stages_of(MODEL, "encode", 0, 1) + stages_of(MODEL, "decode", 1, 1)
    made = schedule(
        policy, workload=workload, stages=stages, cluster=parse_cluster("2xA40"), kv_blocks=900, adjust=0.05
    )
    meter = Meter(PROFILE, Arrivals.poisson(workload, None, seed=3, count=400), RateBounds(1.0))
    assert {meter.holds(with_batches(made, batch, batch), 2.0, 400) for batch in (64, 32, 16)} == {True}
    assert meter.replays == 1
