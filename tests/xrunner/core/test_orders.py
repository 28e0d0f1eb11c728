"""The engine and the event simulator take the same decisions under every order, with and without preemptions."""

import random

import pytest

from tests.xcore.orders.cases import DEMANDS
from tests.xcore.small_specs import profile
from tests.xrunner.cells import requests, schedule
from xcore.batching import Hints, Preemption
from xcore.orders import ORDERS, StarvationGuard, make_order
from xcore.specs.workload import RequestLengths, Workload
from xrunner.core.engine import Engine
from xrunner.models import load_model
from xsimulator.replay.event_simulator import replay

ROOMY, SMALL = 200, 9
LENGTHS = [(1 + 13 * i % 60, 2 + 7 * i % 30) for i in range(24)]
BY_THE_CLOCK = {"mlfq", "doubling-budget"}
"""What these orders know of preempted sequences is how long they ran, which a prediction has otherwise."""


def hints():
    """Of clients, applications and deadlines that no other order has."""
    rng = random.Random(5)
    return [
        Hints(
            application="abc"[i % 3],
            run=str(i // 4),
            unit=("first", "second")[i // 2 % 2],
            application_arrival_s=float(-i // 4),
            client=str(i // 9),
            deadline_s=rng.uniform(1e3, 2e3),
            output_tokens=output,
            score=rng.random(),
            prefill_s=prompt * 1e-2,
            time_s=output * rng.uniform(1.0, 9.0),
            service_time_s=rng.uniform(1e6, 2e6),
        )
        for i, (prompt, output) in enumerate(LENGTHS)
    ]


@pytest.fixture(scope="module")
def model(directories):
    return load_model(directories["llama"])


def decisions(spans):
    """What every step had in it, in order."""
    return [(span.phase, span.sequences, span.tokens) for span in sorted(spans, key=lambda span: span.start_s)]


def both(model, order, blocks, policy="chunked", preemption=None):
    """A run, and the replay of the same requests."""
    plan, known = schedule(model.spec, policy, kv_blocks=blocks, admission="grow"), hints()
    how = {"order": order, "preemption": preemption}
    run = Engine(model, plan).run(requests(LENGTHS), hints=lambda request: known[int(request.id)], **how)
    lengths = [RequestLengths(*row) for row in LENGTHS]
    return run, replay(plan, profile(model.spec), lengths, step_by_step=True, hints=known, **how)


@pytest.mark.parametrize("host_blocks", [0, 3, 100])
@pytest.mark.parametrize("policy", ["chunked", "orca"])
def test_the_engine_and_the_replay_swap_and_recompute_the_same_requests(model, policy, host_blocks):
    order = StarvationGuard(make_order("learned"), idle_steps=7, quantum=3)
    run, predicted = both(model, order, SMALL, policy, Preemption(host_blocks))
    assert decisions(run.timeline.spans) == decisions(predicted.timeline.spans)
    assert run.preemptions == predicted.preemptions > 5


def begun(served):
    """Indices in the order in which their prompts began; those of one step by index."""
    return [s.index for s in sorted(served, key=lambda s: (s.start_s, s.index))]


GUARDED = ("fcfs", "srtf", "mlfq")
"""Orders of each kind, by arrivals, by lengths and by the clock: the others are guarded in `make test-all`."""


@pytest.mark.parametrize(
    ("name", "guarded"),
    [
        *(pytest.param(name, False, id=f"{name}-alone") for name in ORDERS),
        *(
            pytest.param(name, True, id=f"{name}-guarded", marks=() if name in GUARDED else pytest.mark.slow)
            for name in ORDERS
        ),
    ],
)
def test_the_engine_decides_as_the_simulator(model, name, guarded):
    order = make_order(name, demands=DEMANDS)
    order = StarvationGuard(order, idle_steps=7, quantum=3) if guarded else order
    run, predicted = both(model, order, ROOMY if name in BY_THE_CLOCK else SMALL)
    assert begun(run.served) == begun(predicted.served)
    assert decisions(run.timeline.spans) == decisions(predicted.timeline.spans)
    assert run.preemptions == predicted.preemptions
    assert name in BY_THE_CLOCK or run.preemptions > 1


def test_orders_differ_here(model):
    """So that the same decisions mean something."""
    ways = [begun(both(model, make_order(name, demands=DEMANDS), ROOMY, "orca")[0].served) for name in ORDERS]
    assert len({tuple(way) for way in ways}) >= len(ORDERS) - 2


def test_adjusted_batches_are_the_replays(model):
    """Prompts are exchanged, batches resized, and the decisions the same."""
    wanted = Workload.from_requests("these", [RequestLengths(*row) for row in LENGTHS])
    plans = [schedule(model.spec, "rra", kv_blocks=ROOMY, workload=wanted, adjust=share) for share in (None, 0.02)]
    runs = [Engine(model, plan).run(requests(LENGTHS)) for plan in plans]
    for plan, run in zip(plans, runs, strict=True):
        predicted = replay(plan, profile(model.spec), [RequestLengths(*row) for row in LENGTHS], step_by_step=True)
        assert decisions(run.timeline.spans) == decisions(predicted.timeline.spans)
    assert decisions(runs[0].timeline.spans) != decisions(runs[1].timeline.spans)
    plain, adjusted = ({r.id: r.output_ids for r in run.results} for run in runs)
    assert plain == adjusted
