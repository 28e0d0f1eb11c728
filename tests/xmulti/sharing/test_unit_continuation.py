"""A unit's continuation is the rest of its replay, from wherever that is stopped."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.simulated_services import PROFILES, arrivals, services
from xcore.specs.cluster_plan import Share
from xmulti.sharing.plan_replay import replay_models
from xmulti.sharing.replay import empty_tenant, sequences_of
from xmulti.sharing.simulated_unit import SimulatedUnit
from xmulti.sharing.unit_continuation import UnitContinuation
from xmulti.sharing.unit_loads import CONTENTION, loads_of, overhead_of, rule_of
from xsimulator.replay.continuation import Standing
from xsimulator.replay.event_queue import run
from xsimulator.replay.record import Record

SHARES = [Share("time"), Share("time", pool="merged"), Share("priority", pool="merged"), Share("space", 0.5)]


def unit_of(share, kv_blocks=1600):
    return tuple(replace(model, share=share) for model in services(kv_blocks=kv_blocks))


@pytest.mark.parametrize("share", SHARES)
def test_from_nothing_it_is_a_replay(share):
    unit = unit_of(share, kv_blocks=400)
    requests = {
        name: [replace(request, arrival_s=0.0) for request in rows[:25]]
        for name, rows in arrivals(unit, 8.0, 20.0).items()
    }
    served = replay_models(unit, PROFILES, requests)
    standing = {name: [Standing(r.input, r.output, r.output) for r in rows] for name, rows in requests.items()}
    after = UnitContinuation(unit, PROFILES).run(standing, 1e9)
    for model in unit:
        front_end_s = PROFILES[model.name].front_end_s
        for one in served[model.name].served:
            found = after[model.name][one.index]
            assert found.start_s == one.start_s
            assert found.finish_s == pytest.approx(one.finish_s - front_end_s, rel=1e-12)


@pytest.mark.parametrize("pool", ["quotas", "merged"])
@pytest.mark.parametrize("at_s", [2.0, 5.0, 9.0])
def test_from_the_middle_it_is_the_rest_of_the_replay(pool, at_s):
    """But for the job that runs, whose rest isn't known."""
    unit = unit_of(Share("time", pool=pool), kv_blocks=900)
    requests = {name: rows[:70] for name, rows in arrivals(unit, 8.0, 9.0).items()}
    requests = {name: [row for row in rows if row.arrival_s < at_s] for name, rows in requests.items()}
    standing, places, ends = stopped(unit, requests, at_s)
    after = UnitContinuation(unit, PROFILES).run(standing, 1e9)
    errors = [
        at_s + found.finish_s - ends[name][place]
        for name, rows in after.items()
        for found, place in zip(rows, places[name], strict=True)
    ]
    longest_s = max(end_s for of_model in ends.values() for end_s in of_model.values()) - at_s
    assert len(errors) > 10 and np.abs(errors).max() < 0.03 * longest_s


def stopped(unit, requests, at_s):
    """Each model's sequences at a time, their indices, and when all of its requests end."""
    loads = loads_of(unit, PROFILES, {})
    records = {load.name: Record(len(requests[load.name]), lambda _: 0, False) for load in loads}
    tenants = [empty_tenant(load, records[load.name]) for load in loads]
    for tenant in tenants:
        tenant.ledger.submit(sequences_of(requests[tenant.name], ()))
    simulated = SimulatedUnit(
        tenants, rule_of(unit[0].share), CONTENTION, overhead_of(unit, PROFILES), step_by_step=True
    )
    run([simulated], at_s)
    standing, places = {}, {}
    for tenant in tenants:
        present = [*tenant.ledger.resident, *sorted(tenant.ledger.waiting, key=lambda sequence: sequence.index)]
        lengths = requests[tenant.name]
        standing[tenant.name] = [
            Standing(s.input_tokens, s.max_output, lengths[s.index].output, s.generated, arrival_s=s.arrival_s - at_s)
            for s in present
        ]
        places[tenant.name] = [s.index for s in present]
    run([simulated])
    ends = {name: {served.index: served.finish_s for served in record.served} for name, record in records.items()}
    return standing, places, ends


def test_nothing_ends_beyond_the_horizon():
    unit = unit_of(Share("time"))
    standing = {"chat": [Standing(100, 200, 200)], "summary": [Standing(100, 5, 5)]}
    after = UnitContinuation(unit, PROFILES).run(standing, 1.0)
    assert after["chat"][0].finish_s is None and after["chat"][0].start_s is not None
    assert after["summary"][0].finish_s < 1.0
