"""Dynamic adjustment: batches near their targets, and nobody waits for ever."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.xcore.small_specs import profile, schedule
from xcore.batching import BlockPool, Ledger, Sequence
from xcore.errors import InputError
from xcore.orders import fcfs
from xcore.policies.adjustment import Adjustment
from xcore.policies.from_schedule import make_policy
from xcore.policies.joining import Joining
from xcore.policies.rra import RRAPolicy
from xcore.policies.waa import WAAPolicy
from xcore.specs.workload import Workload, task
from xsimulator.replay.event_simulator import replay

lengths = st.lists(st.integers(1, 400), min_size=1, max_size=24)


def adjustment(threshold=0.05, mean=100.0, encode_batch=4, decode_batch=12):
    return Adjustment(threshold, mean, encode_batch, decode_batch)


def sequences(inputs, outputs=5):
    return [Sequence(i, n, outputs) for i, n in enumerate(inputs)]


def miss(chosen, mean=100.0):
    return abs(sum(one.input_tokens for one in chosen) - mean * len(chosen))


@given(lengths, st.integers(1, 8), st.floats(0.0, 0.5))
def test_a_batch_has_its_size_and_the_first_in_the_queue_and_misses_its_target_by_no_more_than_without(
    inputs, count, threshold
):
    candidates = sequences(inputs)
    chosen = adjustment(threshold).pick(candidates, count)
    assert len(chosen) == min(count, len(candidates))
    assert chosen[0] is candidates[0]
    assert [one.index for one in chosen] == sorted({one.index for one in chosen})
    assert miss(chosen) <= miss(candidates[:count])


@given(lengths, st.integers(2, 6))
def test_no_exchange_of_two_brings_it_nearer(inputs, count):
    candidates = sequences(inputs)
    chosen = adjustment(0.0).pick(candidates, count)
    others = [one for one in candidates if one not in chosen]
    for leaves, comes in itertools.product(chosen[1:], others):
        assert miss([*(one for one in chosen if one is not leaves), comes]) >= miss(chosen)


def test_a_batch_within_the_threshold_is_taken_as_it_comes():
    candidates = sequences([104, 104, 104, 104, 100, 96, 92])
    assert adjustment(0.05).pick(candidates, 4) == candidates[:4]
    assert miss(adjustment(0.01).pick(candidates, 4)) == 4
    assert miss(adjustment(0.0).pick(candidates, 4)) == 0


@pytest.mark.parametrize(
    ("residents", "count"),
    [(8, 4), (9, 4), (7, 4), (6, 4), (11, 3), (5, 5), (40, 3), (0, 5)],
)
def test_more_or_fewer_are_encoded_where_the_decoding_batch_misses_its_target(residents, count):
    assert adjustment(0.2).count(residents) == count


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 30)), min_size=1, max_size=40),
    st.integers(1, 6),
    st.floats(0.0, 0.3),
    st.integers(21, 200),
)
def test_everybody_is_served_and_every_block_comes_back(pairs, encode_batch, threshold, blocks):
    ledger = Ledger(BlockPool(blocks, 16), fcfs)
    waiting = [Sequence(i, n, m) for i, (n, m) in enumerate(pairs)]
    ledger.submit(waiting)
    policy = RRAPolicy(
        encode_batch, 5, Joining(adjustment=Adjustment(threshold, 150.0, encode_batch, 3 * encode_batch))
    )
    for _ in range(100_000):
        if ledger.idle:
            break
        step = policy.next_step(ledger, 0.0)
        assert step is not None
        for sequence, tokens in (*step.encode, *((s, 1) for s in step.decode)):
            assert len(sequence.blocks) * 16 >= sequence.cached + tokens, "every token has a slot"
        ledger.advance(step)
        ledger.check()
    assert all(one.finished for one in waiting)
    assert ledger.pool.available == blocks


def test_waa_picks_too():
    ledger = Ledger(BlockPool(1000, 16), fcfs)
    ledger.submit(sequences([200, 200, 100, 30, 70, 10]))
    step = WAAPolicy(3, Joining(adjustment=adjustment(0.01, encode_batch=3))).next_encode(ledger, 0.0)
    assert [one.input_tokens for one, _ in step.encode] == [200, 100, 10]
    assert [one.input_tokens for one in ledger.waiting.first(9, 0.0)] == [200, 30, 70]


@pytest.mark.parametrize(("place", "picked"), [(7, [0, 7]), (8, [0, 1])])
def test_batches_are_picked_from_four_at_the_front_of_the_queue(place, picked):
    ledger = Ledger(BlockPool(1000, 16), fcfs)
    ledger.submit(sequences([50 if i == place else 150 for i in range(12)]))
    joining = Joining(adjustment=adjustment(0.01, encode_batch=2))
    assert [one.index for one in joining.admit(ledger, 0.0, 2)] == picked


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_it_is_a_share(share):
    with pytest.raises(InputError, match=r"adjustment .* between 0 and 1"):
        make_policy(schedule(), share)


def test_its_targets_are_the_schedules():
    made = schedule("rra", workload=Workload.fixed(100, 20))
    assert make_policy(made, 0.1).joining.adjustment == Adjustment(
        0.1, 100.0, made.control.encode_batch, made.control.decode_batch
    )
    assert make_policy(made).joining.adjustment is None
    assert make_policy(made, 0.0).joining.adjustment.threshold == 0.0
    assert make_policy(made, 1.0).joining.adjustment.threshold == 1.0


def test_the_replay_follows_it():
    """Batches' tokens then vary less, and nobody is lost."""
    drawn = task("S").draw(400, seed=1)
    made = schedule("rra", workload=task("S").without_requests, encode_batch=8, kv_blocks=4000)
    tables = profile()

    def encoded(adjustment):
        run = replay(made, tables, drawn, adjustment=adjustment)
        assert sorted(one.index for one in run.served) == list(range(400))
        return np.std([span.tokens for span in run.timeline.spans if span.phase == "encode"][2:-5])

    assert encoded(0.02) < 0.5 * encoded(None)
