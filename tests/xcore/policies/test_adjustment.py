"""Dynamic adjustment: batches near their targets, and no request is passed over more than four times."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.xcore.small_specs import schedule
from xcore.batching import BlockPool, Hints, Ledger, Sequence
from xcore.errors import InputError
from xcore.orders import fcfs
from xcore.orders.shortest import SJF
from xcore.policies.adjustment import MOST_PASSED_OVER, Adjustment
from xcore.policies.from_schedule import make_policy
from xcore.policies.joining import Joining
from xcore.policies.rra import RRAPolicy
from xcore.policies.waa import WAAPolicy
from xcore.specs.workload import Workload

lengths = st.lists(st.integers(1, 400), min_size=1, max_size=24)


def adjustment(share=0.05, mean=100.0, encode_batch=4, decode_batch=12):
    return Adjustment(share, mean, encode_batch, decode_batch)


def sequences(inputs, outputs=5):
    return [Sequence(i, n, outputs) for i, n in enumerate(inputs)]


def miss(chosen, tokens=400.0):
    return abs(sum(one.input_tokens for one in chosen) - tokens)


@given(lengths, st.integers(0, 30), st.floats(0.0, 0.5))
def test_a_batch_is_in_order_and_not_worse_than_the_first_prompts(inputs, residents, share):
    """By its tokens, and its sequences at a third of their weight."""
    candidates, ours = sequences(inputs), adjustment(share)
    wanted = ours.count(residents)
    chosen = ours.choose(candidates, residents)
    assert [one.index for one in chosen] == sorted({one.index for one in chosen})
    assert 1 <= len(chosen) <= 8

    def error(batch):
        return miss(batch) ** 2 + ((len(batch) - wanted) * 100 / 3) ** 2

    assert error(chosen) <= error(candidates[:wanted]) + 1e-6


def test_a_batch_within_the_share_is_taken_as_it_comes():
    candidates = sequences([104, 104, 104, 104, 100, 96, 92])
    assert adjustment(0.05).choose(candidates, 8) == candidates[:4]
    assert miss(adjustment(0.01).choose(candidates, 8)) == 4
    assert miss(adjustment(0.0).choose(candidates, 8)) == 0


@pytest.mark.parametrize(("residents", "count"), [(8, 4), (9, 3), (7, 5), (6, 6), (11, 1), (40, 1), (0, 8)])
def test_as_many_are_encoded_as_the_decoding_batch_lacks(residents, count):
    assert adjustment(0.2).count(residents) == count


def test_a_deviation_within_the_share_is_left():
    assert [adjustment(0.25).count(residents) for residents in (7, 8, 9)] == [4, 4, 4]


def test_the_batch_is_resized_where_no_exchange_helps():
    """Without exchange, which another order than that of arrival forbids, the first in the queue stay the first."""
    long, short = sequences([200] * 8), sequences([50] * 16)
    assert len(adjustment().choose(long, 8)) == 2 and len(adjustment().choose(short, 8)) == 7
    mixed = sequences([300, 10, 300, 10, 20, 30])
    assert adjustment().choose(mixed, 8, exchange=False) == mixed[:2]


def test_the_level_follows_the_residents_only_while_requests_wait():
    waiting, alone = adjustment(decode_batch=40), adjustment(decode_batch=40)
    for _ in range(2000):
        waiting.choose(sequences([100] * 9), 30)
        alone.choose(sequences([100] * 3), 30)
    assert waiting.level == pytest.approx(30.0) and waiting.count(30) == 4
    assert alone.level == 36.0


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 30)), min_size=1, max_size=40),
    st.integers(1, 6),
    st.floats(0.0, 0.3),
    st.integers(21, 200),
)
def test_every_request_is_served_and_passed_over_at_most_four_times(pairs, encode_batch, share, blocks):
    """And every block comes back."""
    ledger = Ledger(BlockPool(blocks, 16), fcfs)
    waiting = [Sequence(i, n, m) for i, (n, m) in enumerate(pairs)]
    ledger.submit(waiting)
    ours = Adjustment(share, 150.0, encode_batch, 3 * encode_batch)
    policy, passed = RRAPolicy(encode_batch, 5, Joining(adjustment=ours)), dict.fromkeys(range(len(pairs)), 0)
    for _ in range(100_000):
        if ledger.idle:
            break
        step = policy.next_step(ledger, 0.0)
        assert step is not None
        last = max((sequence.index for sequence, _ in step.encode), default=-1)
        for other in ledger.waiting:
            passed[other.index] += other.index < last
        for sequence, tokens in (*step.encode, *((s, 1) for s in step.decode)):
            assert len(sequence.blocks) * 16 >= sequence.cached + tokens, "every token has a slot"
        ledger.advance(step)
        ledger.check()
    assert all(one.finished for one in waiting)
    assert max(passed.values()) <= MOST_PASSED_OVER
    assert ledger.pool.available == blocks


@pytest.mark.parametrize(("order", "encoded"), [(fcfs, [200, 100, 10]), (SJF(), [10, 30, 70, 100])])
def test_prompts_are_exchanged_unless_an_order_sets_their_precedence(order, encoded):
    """The shortest ones come first then: only their number is adjusted, to 310 tokens in three prompts."""
    ledger = Ledger(BlockPool(1000, 16), order)
    inputs = enumerate([200, 200, 100, 30, 70, 10])
    ledger.submit([Sequence(i, n, n, hints=Hints(output_tokens=n)) for i, n in inputs])
    policy = WAAPolicy(3, Joining(adjustment=Adjustment(0.01, 310 / 3, 3, 3)))
    step = policy.next_encode(ledger, 0.0)
    assert [one.input_tokens for one, _ in step.encode] == encoded


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_it_is_a_share(share):
    with pytest.raises(InputError, match=r"adjust .* between 0 and 1"):
        schedule(adjust=share)


def test_its_targets_are_the_schedules():
    made = schedule("rra", workload=Workload.fixed(100, 20))
    assert make_policy(made).joining.adjustment is None
    ours = make_policy(replace(made, adjust=0.1)).joining.adjustment
    assert (ours.share, ours.tokens, ours.level) == (0.1, 400.0, 5.0)
    assert make_policy(replace(made, adjust=0.0)).joining.adjustment.share == 0.0


@pytest.mark.parametrize("policy", ["rra", "waa-c"])
def test_tokens_of_a_batch_and_the_decoding_batch_vary_half_as_much(policy):
    """In the replay, at equal throughput; WAA's decoding batch can't be steered as much (docs/theory.md)."""
    from benchmarks.adjustment import CASES, measured

    case = next(case for case in CASES if case.policy == policy)
    plain, adjusted = measured(case, None, 1500), measured(case, 0.05, 1500)
    assert adjusted.tokens.std < 0.5 * plain.tokens.std
    assert adjusted.decode_batch.std < (0.5 if policy == "rra" else 0.9) * plain.decode_batch.std
    assert adjusted.throughput_seq_s == pytest.approx(plain.throughput_seq_s, rel=0.02)
