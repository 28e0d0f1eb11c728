"""Quotas that follow what models use: what moves, what stays, and what it gives under a load that was not planned."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exegpt.batching import Ledger, Sequence
from exegpt.batching.shared_pool import QuotaPool, Store
from exegpt.orders import fcfs
from exegpt.policies.one_phase import OnePhasePolicy as Limits
from exegpt.workload import RequestLengths
from tests.xsimulator.multimodel.test_unit import BLOCK, MODELS, Cost, loads
from xsimulator.multimodel.quota_adaptation import FULL, GROWTH, HEADROOM, WINDOW, QuotaAdaptation
from xsimulator.multimodel.replay import Load, replay_unit
from xsimulator.multimodel.tenant import Tenant
from xsimulator.replay.record import Record

LEAST = 5


def tenant(name, store, quota, held, waiting):
    """A model that holds some blocks, and has requests that wait."""
    pool = QuotaPool(store, 2, BLOCK, quota)
    made = Tenant(name, Ledger(pool, fcfs, admission="grow"), Cost(), Limits(), Record(waiting, lambda _: 0, False))
    pool.allocate(held)
    made.ledger.submit(Sequence(i, 3, 3, 0.0) for i in range(waiting))
    return made


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(LEAST, 200), st.floats(0, 1), st.integers(0, 9)), min_size=1, max_size=4),
    st.integers(1, WINDOW - 1),
)
def test_quotas_keep_their_sum_and_what_is_used(models, iterations):
    store = Store(2 * sum(blocks for blocks, _, _ in models))
    tenants = [tenant(f"m{i}", store, 2 * b, int(b * u), waiting) for i, (b, u, waiting) in enumerate(models)]
    adaptation = QuotaAdaptation(dict.fromkeys(tenants, LEAST))
    for one in tenants:
        adaptation._usages[one].add(iterations, 1)
    before = {one: one.ledger.pool.quota for one in tenants}
    used = {one: one.ledger.pool.held / one.ledger.pool.total for one in tenants}
    adaptation.adapt(0.0)
    grown = {one: one.ledger.pool.quota - before[one] for one in tenants}
    assert -len(tenants) <= sum(grown.values()) <= 0, "parts are whole"
    for one, (_, _, waiting) in zip(tenants, models, strict=True):
        pool = one.ledger.pool
        assert pool.held <= pool.total and pool.total >= LEAST
        assert grown[one] <= GROWTH * before[one]
        if grown[one] > 0:
            assert used[one] >= FULL and waiting > 1
        if grown[one] < 0:
            assert used[one] < FULL and pool.quota >= used[one] / HEADROOM * before[one] - 1
        pool.check(Counter(range(pool.held)))
    full = [one for one, (_, _, waiting) in zip(tenants, models, strict=True) if used[one] >= FULL and waiting > 1]
    spare = sum(max(0, q - max(used[t] / HEADROOM * q, 2 * LEAST)) for t, q in before.items() if used[t] < FULL)
    if min(spare, sum(GROWTH * before[one] for one in full)) > 2 * len(tenants):  # else rounding may take it all
        assert max(grown.values()) > 0


def test_nothing_moves_before_a_window_is_over_and_old_jobs_are_forgotten():
    store = Store(400)
    busy, idle = tenant("busy", store, 200, 100, 9), tenant("idle", store, 200, 0, 0)
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
    with pytest.raises(ValueError, match="11 parts for 6 blocks"):
        pool.resize(11)


@settings(deadline=None, max_examples=100)
@given(MODELS, st.sampled_from(["space", "time"]))
def test_nothing_is_lost_while_quotas_move(models, sharing):
    run = replay_unit(loads(models), sharing, adapt_quotas=True)
    for place, (rows, _) in enumerate(models):
        assert sorted(s.index for s in run.served[f"m{place}"]) == list(range(len(rows)))


def test_a_model_with_more_load_than_was_planned_gets_the_others_memory():
    """Two models with equal quotas, one of them with nearly all of the requests, more than it can serve: a tenth more
    at a time as long as its queue grows.
    """

    def run(**options):
        store = Store(120)
        rows = {"busy": [RequestLengths(10, 40, 0.1 * i) for i in range(1000)], "rare": [RequestLengths(8, 8, 3.0)] * 5}
        both = [Load(name, Cost(), some, QuotaPool(store, 1, BLOCK, 60), Limits(64, 64)) for name, some in rows.items()]
        return replay_unit(both, "time", **options), both

    fixed, _ = run()
    adapted, (busy, rare) = run(adapt_quotas=True)
    assert 118 <= busy.pool.quota + rare.pool.quota <= 120 and busy.pool.quota > 80
    assert adapted.seconds < 0.9 * fixed.seconds
