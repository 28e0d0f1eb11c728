"""Pools of several models over one memory: nothing is given twice, lost, or beyond a quota."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.xcore.small_specs import schedule
from xcore.batching import BlockPool
from xcore.batching.shared_pool import (
    MergedBlocks,
    MergedPool,
    QuotaPool,
    Store,
    block_size,
    least_memory,
    least_quota,
    merged_pools,
    quota_pools,
    shared_pools,
)
from xcore.errors import InputError
from xcore.specs.workload import Workload

ACTIONS = st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(1, 5)), max_size=60)


def follow(pools, actions):
    """Allocate and free as told, as far as there is room; check after each action. Returns what is held."""
    held = [[] for _ in pools]
    for which, takes, count in actions:
        pool, own = pools[which], held[which]
        if takes and count <= pool.available:
            own += pool.allocate(count)
        elif takes:
            with pytest.raises(MemoryError):
                pool.allocate(count)
        else:
            gone, own[:] = own[:count], own[count:]
            pool.free(gone)
        for one, blocks in zip(pools, held, strict=True):
            assert len(set(blocks)) == len(blocks)
            one.check(Counter(blocks))
    return held


@settings(deadline=None)
@given(ACTIONS, st.integers(4, 30))
def test_quotas_and_the_store_are_kept(actions, total):
    store = Store(total)
    pools = [QuotaPool(store, parts, 16, max(parts, total // 2)) for parts in (1, 2, 3)]
    held = follow(pools, actions)
    used = sum(len(blocks) * parts for blocks, parts in zip(held, (1, 2, 3), strict=True))
    assert store.used == used <= total
    assert all(
        len(blocks) <= pool.total == max(parts, total // 2) // parts
        for blocks, parts, pool in zip(held, (1, 2, 3), pools, strict=True)
    )


@settings(deadline=None)
@given(ACTIONS, st.integers(1, 10))
def test_merged_blocks_have_one_models_slots_alone(actions, total):
    merged = MergedBlocks(total, 1000)
    pools = [MergedPool(merged, bytes, 16) for bytes in (1000, 480, 320)]
    assert [pool.slots for pool in pools] == [1, 2, 3]
    held = follow(pools, actions)
    blocks = [{block // pool.slots for block in own} for pool, own in zip(pools, held, strict=True)]
    assert not (blocks[0] & blocks[1] | blocks[0] & blocks[2] | blocks[1] & blocks[2])
    assert sum(map(len, blocks)) + merged.free == total


@settings(deadline=None)
@given(ACTIONS, st.integers(1, 10), st.lists(st.tuples(st.integers(1, 6), st.integers(1, 40)), min_size=3, max_size=3))
def test_no_two_blocks_overlap_in_memory(actions, total, kinds):
    """Block `b` of a model takes its pieces from piece b on, and merged blocks are whole pieces of every model."""
    sizes = [(pieces * bytes, pieces) for pieces, bytes in kinds]
    merged = MergedBlocks.within(total * 10_000_000, sizes)
    assert merged.bytes >= max(size for size, _ in sizes)
    assert all(merged.bytes % (size // pieces) == 0 for size, pieces in sizes)
    pools = [MergedPool(merged, size, 16, pieces, quota=1 + merged.total // 2) for size, pieces in sizes]
    held = follow(pools, actions)
    spans = sorted(
        (block * size // pieces, block * size // pieces + size)
        for own, (size, pieces) in zip(held, sizes, strict=True)
        for block in own
    )
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert not spans or spans[-1][1] <= merged.total * merged.bytes


def test_a_model_keeps_to_the_merged_blocks_that_it_may_have():
    merged = MergedBlocks(4, 100)
    pool = MergedPool(merged, 50, 16, quota=1)
    assert pool.total == pool.available == 2
    pool.allocate(2)
    assert pool.available == 0 and merged.free == 3


def test_a_7b_block_wastes_a_third_of_a_13b_block():
    """Merged blocks of 13B hold one of 7B's (32 of 40 layers, 4,096 of 5,120 wide): 36 % stays empty (SeaLLM)."""
    small, large = 2 * 32 * 4096 * 2 * 16, 2 * 40 * 5120 * 2 * 16
    pool = MergedPool(MergedBlocks(10, large), small, 16)
    assert pool.slots == 1 and pool.total == 10
    assert 1 - pool.slots * small / large == pytest.approx(0.36)


def test_there_must_be_room_for_a_sequence_of_every_model():
    """Three blocks of 4 bytes fit one of 12: ten of them need four merged blocks, beside two of the larger model."""
    sizes = [(12, 1), (4, 1)]
    assert least_memory(sizes, [2, 10]) == 6 * 12
    large, small = (MergedPool(MergedBlocks.within(6 * 12, sizes), size, 16) for size, _ in sizes)
    assert (large.total, small.total) == (6, 18)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=3))
def test_the_least_memory_holds_a_sequence_of_each_and_no_block_is_to_spare(models):
    sizes = [(pieces * bytes, pieces) for pieces, bytes, _ in models]
    merged = MergedBlocks.within(least_memory(sizes, [blocks for *_, blocks in models]), sizes)
    for (size, pieces), (*_, blocks) in zip(sizes, models, strict=True):
        assert len(MergedPool(merged, size, 16, pieces).allocate(blocks)) == blocks
    assert merged.free == 0


def test_a_block_larger_than_a_merged_one_and_a_quota_below_a_block_are_refused():
    with pytest.raises(InputError, match="1,001 bytes does not fit in a merged block of 1,000"):
        MergedPool(MergedBlocks(4, 1000), 1001, 16)
    with pytest.raises(InputError, match="not usable"):
        QuotaPool(Store(10), 4, 16, 3)


def test_a_block_that_comes_back_twice_is_noticed():
    merged = MergedPool(MergedBlocks(2, 100), 30, 16)
    blocks = merged.allocate(2)
    merged.free(blocks[:1])
    with pytest.raises(ValueError, match="was freed twice"):
        merged.free(blocks[:1])
    quota = QuotaPool(Store(10), 1, 16, 10)
    with pytest.raises(ValueError, match="only 0 were allocated"):
        quota.free([1])


def test_a_quota_moves_as_far_as_its_blocks_and_the_store_allow():
    """Blocks of three parts in a store of 20."""
    store = Store(20)
    pool = QuotaPool(store, 3, 16, 6)
    assert (pool.total, pool.available) == (2, 2)
    pool.resize(3)
    assert (pool.total, pool.available, pool.quota) == (1, 1, 3)
    with pytest.raises(ValueError, match="the quota of 2 parts is too small: 0 blocks of 3"):
        pool.resize(2)
    pool.resize(11)
    blocks = pool.allocate(3)
    assert (pool.total, pool.available, store.used) == (3, 0, 9)
    with pytest.raises(ValueError, match="the quota of 8 parts is too small: 3 blocks of 3"):
        pool.resize(8)
    pool.resize(9)
    pool.resize(60)
    assert (pool.total, pool.available) == (6, 3)
    store.used += 7  # another pool's
    assert pool.available == 1
    pool.free(blocks)
    assert (store.used, store.free, pool.available) == (7, 13, 4)


def test_the_blocks_of_schedules_come_to_one_memory():
    """Two of one model, whose blocks are the merged ones."""
    schedules = [replace(schedule("orca"), kv_blocks=blocks) for blocks in (7, 5)]
    merged, pools = merged_pools(schedules)
    assert merged.free == 12 and [(pool.total, pool.slots, pool.block_size) for pool in pools] == [(12, 1, 16)] * 2


def of(layers, kv_heads, blocks):
    """A schedule of a model of so many layers and heads."""
    like = schedule("orca")
    spec = replace(like.model.spec, layers=layers, heads=8 * kv_heads, kv_heads=kv_heads)
    return replace(like, model=replace(like.model, spec=spec), kv_blocks=blocks)


SMALL = st.builds(of, st.integers(1, 8), st.integers(1, 4), st.integers(1, 40))
MODELS = st.lists(st.builds(of, st.integers(1, 80), st.integers(1, 16), st.integers(1, 4000)), min_size=1, max_size=4)


@settings(deadline=None)
@given(MODELS)
def test_slabs_hold_what_schedules_have_and_lose_little(schedules):
    slabs, pools = quota_pools(schedules)
    sizes = [block_size(one)[0] for one in schedules]
    assert sum(pool.quota for pool in pools) == slabs.total
    for one, size, pool in zip(schedules, sizes, pools, strict=True):
        assert one.kv_blocks <= pool.total and pool.slots == slabs.bytes // size
        assert pool.total - pool.slots < one.kv_blocks, "and a slab less would not do"
    wanted = sum(one.kv_blocks * size for one, size in zip(schedules, sizes, strict=True))
    if wanted > 2000 * len(schedules) * max(sizes):
        assert slabs.total * slabs.bytes < 1.02 * wanted
        assert slabs.total >= 16 * len(schedules)


@settings(deadline=None)
@given(
    st.lists(st.builds(of, st.integers(1, 8), st.integers(1, 4), st.integers(1, 40)), min_size=3, max_size=3), ACTIONS
)
def test_a_quota_can_be_used_up_whatever_the_others_hold(schedules, actions):
    slabs, pools = quota_pools(schedules)
    held = follow(pools, actions)
    for pool, own in zip(pools, held, strict=True):
        assert pool.held == len(own) and pool.available == pool.total - pool.held
        own += pool.allocate(pool.available)
    assert slabs.free == 0


def test_models_that_are_alike_have_slabs_of_one_block():
    slabs, pools = quota_pools([of(4, 2, 700), of(4, 2, 41)])
    assert (slabs.total, [pool.total for pool in pools], pools[0].slots) == (741, [700, 41], 1)


def test_a_quota_of_slabs_moves_as_far_as_its_slabs_allow():
    """Slabs of three blocks each."""
    slabs = MergedBlocks(4, 90)
    pool = MergedPool(slabs, 30, 16, quota=2)
    blocks = pool.allocate(4)
    assert (pool.held, pool.available, pool.parts_for(4), pool.parts_for(7)) == (4, 2, 2, 3)
    with pytest.raises(ValueError, match="the quota of 1 merged blocks is too small: the model holds 2"):
        pool.resize(1)
    pool.resize(3)
    assert (pool.total, pool.available) == (9, 5)
    pool.free(blocks[:3])
    assert (pool.held, pool.parts_for(0)) == (1, 1)
    pool.resize(1)
    assert (pool.total, pool.available, slabs.free) == (3, 2, 3)
    pool.free(blocks[3:])
    with pytest.raises(ValueError, match="the quota of 0"):
        pool.resize(0)


def test_a_quota_keeps_room_for_the_longest_sequence_of_its_workload():
    like, lengths = of(4, 2, 100), Workload.fixed(100, 61)
    assert least_quota(replace(like, workload=lengths)) == 11
    assert least_quota(replace(like, workload=lengths, kv_blocks=3)) == 3
    assert least_quota(replace(like, workload=Workload.fixed(1000, 900))) == 1024 // 16, "the context"


def test_pools_are_quotas_or_merged_as_a_plan_says():
    schedules = [of(4, 2, 7), of(2, 2, 5)]
    for kind, totals in (("quotas", [7, 6]), ("merged", [9, 18])):
        assert [pool.total for pool in shared_pools(schedules, kind)[1]] == totals


def test_a_model_that_takes_over_a_schedule_may_have_other_blocks():
    """In whole merged blocks, of two of its own each, as far as there are any."""
    pool = MergedPool(MergedBlocks(5, 100), 50, 16)
    for total, whole in ((3, 4), (8, 8), (99, 10)):
        pool.set_total(total)
        assert (pool.total, pool.available) == (whole, whole)
    plain = BlockPool(8, 16)
    held = plain.allocate(5)
    plain.set_total(3)
    assert plain.total == 3 and plain.available < 1
    plain.free(held)
    assert plain.available == 3
