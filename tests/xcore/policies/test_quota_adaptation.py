"""Quotas that follow what models use: what moves, what stays, and what it gives under a load that was not planned."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.xmulti.sharing.test_simulated_unit import BLOCK, MODELS, Cost, loads
from xcore.batching import Ledger, Sequence
from xcore.batching.shared_pool import MergedBlocks, MergedPool, QuotaPool, Store
from xcore.orders import fcfs
from xcore.policies.one_phase import OnePhasePolicy as Limits
from xcore.policies.quota_adaptation import FULL, GROWTH, HEADROOM, WINDOW, QuotaAdaptation
from xcore.specs.workload import RequestLengths
from xmulti.sharing.replay import ModelLoad, replay_unit
from xmulti.sharing.tenant import SimulatedTenant
from xsimulator.replay.record import Record

LEAST = 5


def tenant(name, pool, held, waiting):
    """A model that holds some blocks, and has requests that wait."""
    made = SimulatedTenant(
        name, Ledger(pool, fcfs, admission="grow"), Cost(), Limits(), Record(waiting, lambda _: 0, False)
    )
    pool.allocate(held)
    made.ledger.submit(Sequence(i, 3, 3, 0.0) for i in range(waiting))
    return made


def pools_of(kind, blocks):
    """A pool of so many blocks for each model, of one memory: of head-wise parts, two a block, or of slabs of three."""
    if kind == "parts":
        store = Store(2 * sum(blocks))
        return [QuotaPool(store, 2, BLOCK, 2 * count) for count in blocks]
    quotas = [-(-count // 3) for count in blocks]
    slabs = MergedBlocks(sum(quotas), 90)
    return [MergedPool(slabs, 30, BLOCK, quota=quota) for quota in quotas]


@settings(deadline=None)
@example([(6, 0.0, 0), (70, 0.90625, 2)], 9, "parts")
@given(
    st.lists(st.tuples(st.integers(LEAST, 200), st.floats(0, 1), st.integers(0, 9)), min_size=1, max_size=4),
    st.integers(1, WINDOW - 1),
    st.sampled_from(["parts", "slabs"]),
)
def test_quotas_keep_their_sum_and_what_is_used(models, iterations, kind):
    pools = pools_of(kind, [blocks for blocks, _, _ in models])
    tenants = [
        tenant(f"m{i}", pool, int(pool.total * used), waiting)
        for i, (pool, (_, used, waiting)) in enumerate(zip(pools, models, strict=True))
    ]
    adaptation = QuotaAdaptation(dict.fromkeys(tenants, LEAST))
    for one in tenants:
        adaptation._usages[one].add(iterations, 1)
    before = {one: one.ledger.pool.quota for one in tenants}
    used = {one: one.ledger.pool.held / one.ledger.pool.total for one in tenants}
    adaptation.adapt(0.0)
    grown = {one: one.ledger.pool.quota - before[one] for one in tenants}
    assert sum(grown.values()) == 0
    for one, (_, _, waiting) in zip(tenants, models, strict=True):
        pool = one.ledger.pool
        assert pool.held <= pool.total and pool.total >= LEAST
        assert grown[one] <= max(1, GROWTH * before[one])
        if grown[one] > 0:
            assert used[one] >= FULL and waiting > 1
        if grown[one] < 0:
            assert used[one] < FULL and pool.quota >= used[one] / HEADROOM * before[one] - 1e-9
    full = [one for one, (_, _, waiting) in zip(tenants, models, strict=True) if used[one] >= FULL and waiting > 1]
    spare = 0
    for one, quota in before.items():
        kept = one.ledger.pool.parts_for(max(LEAST, one.ledger.pool.held))
        spare += max(0, int(quota - max(used[one] / HEADROOM * quota, kept))) if used[one] < FULL else 0
    wanted = sum(max(1, int(GROWTH * before[one])) for one in full)
    assert sum(more for more in grown.values() if more > 0) == min(spare, wanted)


def test_nothing_moves_before_a_window_is_over_and_old_jobs_are_forgotten():
    pools = pools_of("parts", [100, 100])
    busy, idle = tenant("busy", pools[0], 100, 9), tenant("idle", pools[1], 0, 0)
    adaptation = QuotaAdaptation({busy: LEAST, idle: LEAST})
    adaptation.decoded(idle, WINDOW - 1, 0.0)
    assert busy.ledger.pool.quota == 200
    adaptation.decoded(busy, 1, 0.0)  # its requests are as many as in the mean
    assert busy.ledger.pool.quota == 200
    usage = adaptation._usages[busy]
    usage.jobs[0] = (1, 1.0, 1)
    adaptation.adapt(0.0)
    assert (busy.ledger.pool.quota, idle.ledger.pool.quota) == (220, 180)
    assert (busy.ledger.pool.total, idle.ledger.pool.total) == (110, 90)
    for _ in range(3):
        usage.add(WINDOW // 2, 1)
    assert usage.iterations <= WINDOW + WINDOW // 2 and len(usage.jobs) <= 3


def test_a_quota_never_lies_below_what_is_held():
    pool = QuotaPool(Store(40), 2, BLOCK, 20)
    pool.allocate(6)
    pool.resize(12)
    assert (pool.total, pool.available) == (6, 0)
    with pytest.raises(ValueError, match="quota of 11 parts is too small: 6 blocks"):
        pool.resize(11)


def test_a_quota_keeps_what_a_waiting_request_may_need():
    """Though it has used nothing, and the other model asks for a tenth more."""
    for longest, left in ((10, 90), (91, 91), (98, 98)):
        pools = pools_of("parts", [100, 100])
        busy, idle = tenant("busy", pools[0], 100, 9), tenant("idle", pools[1], 0, 0)
        idle.ledger.submit([Sequence(0, 3, (longest - 1) * BLOCK, 1e9)])
        adaptation = QuotaAdaptation({busy: LEAST, idle: LEAST})
        adaptation._usages[busy].add(1, 1)
        adaptation.adapt(0.0)
        assert (busy.ledger.pool.total, idle.ledger.pool.total) == (200 - left, left)


@settings(deadline=None, max_examples=100)
@given(MODELS, st.sampled_from(["space", "time"]))
def test_nothing_is_lost_while_quotas_move(models, sharing):
    run = replay_unit([replace(load, least=LEAST) for load in loads(models)], sharing)
    for place, (rows, _) in enumerate(models):
        assert sorted(s.index for s in run.served[f"m{place}"]) == list(range(len(rows)))


def test_a_model_with_more_load_than_was_planned_gets_the_others_memory():
    """Two models with equal quotas, one of them with nearly all of the requests, more than it can serve: a tenth more
    at a time as long as its queue grows.
    """

    def run(least):
        store = Store(120)
        rows = {"busy": [RequestLengths(10, 40, 0.1 * i) for i in range(1000)], "rare": [RequestLengths(8, 8, 3.0)] * 5}
        both = [
            ModelLoad(name, Cost(), some, QuotaPool(store, 1, BLOCK, 60), Limits(64, 64), least=least)
            for name, some in rows.items()
        ]
        return replay_unit(both, "time"), both

    fixed, _ = run(None)
    adapted, (busy, rare) = run(LEAST)
    assert 118 <= busy.pool.quota + rare.pool.quota <= 120 and busy.pool.quota > 80
    assert adapted.seconds < 0.9 * fixed.seconds


def test_the_first_window_is_as_long_as_the_others(monkeypatch):
    adapted = []
    monkeypatch.setattr(QuotaAdaptation, "adapt", lambda self, now: adapted.append(now))
    model = tenant("m", pools_of("parts", [20])[0], 5, 1)
    adaptation = QuotaAdaptation({model: LEAST})
    for iteration in range(1, 3 * WINDOW + 1):
        adaptation.decoded(model, 1, float(iteration))
    assert adapted == [WINDOW, 2 * WINDOW, 3 * WINDOW]
