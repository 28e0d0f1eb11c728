"""Admission by *grow*: blocks come as tokens do, and the last resident is preempted where none are left."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exegpt.batching import BlockPool, Ledger, Sequence
from exegpt.batching.admission import iterations_until_shortage
from exegpt.batching.sequence import DECODE, PREEMPTED, PREFILL, WAITING
from exegpt.errors import InputError
from exegpt.orders import fcfs
from exegpt.policies import make_ledger
from exegpt.policies.chunked import ChunkedPolicy
from exegpt.policies.orca import OrcaPolicy
from exegpt.workload import RequestLengths
from tests.exegpt.nouns import profile, schedule
from xsimulator.replay.event_simulator import replay

BLOCK = 4
REQUESTS = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 20), st.sampled_from([0.0, 0.0, 3.0, 10.0])), min_size=1, max_size=12
)
POLICIES = st.one_of(
    st.builds(OrcaPolicy, st.integers(1, 8), st.integers(1, 4)),
    st.builds(ChunkedPolicy, st.integers(1, 8), st.integers(1, 30)),
)
ACTIONS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 11), st.sampled_from(["stop", "cancel"])), max_size=4)


def ledger_of(blocks):
    return Ledger(BlockPool(blocks, BLOCK), fcfs, admission="grow")


@settings(max_examples=300, deadline=None)
@given(POLICIES, REQUESTS, st.integers(10, 16), ACTIONS)
def test_nothing_is_lost_or_leaked_whoever_is_preempted_stopped_or_cancelled(policy, requests, blocks, actions):
    """10 blocks hold the longest request alone."""
    ledger = ledger_of(blocks)
    sequences = [Sequence(i, *request) for i, request in enumerate(requests)]
    ledger.submit(sequences)
    now, ended = 0.0, []
    for step_number in range(10_000):
        if ledger.idle:
            break
        for _, index, action in [one for one in actions if one[0] == step_number]:
            victim = sequences[index % len(sequences)]
            if victim in ended or (action == "stop" and not victim.generated):
                continue
            getattr(ledger, action)(victim)
            ended.append(victim)
        step = policy.next_step(ledger, now)
        if step is None:
            now = max(now + 1.0, ledger.waiting.next_arrival(now) or 0.0)
            continue
        for sequence, count in (*step.encode, *((sequence, 1) for sequence in step.decode)):
            assert len(sequence.blocks) * BLOCK >= sequence.cached + count, "every token has a slot"
        ended += ledger.advance(step)
        ledger.check()
        now += 1.0
    assert ledger.idle and ledger.pool.available == blocks
    assert sorted(sequence.index for sequence in ended) == list(range(len(requests)))
    for sequence, (_, output, _) in zip(sequences, requests, strict=True):
        stopped = any(i % len(sequences) == sequence.index for _, i, _ in actions)
        assert stopped or sequence.generated == output


def test_the_last_resident_gives_way_and_comes_back_with_its_output():
    ledger, policy = ledger_of(5), ChunkedPolicy(8, 64)
    first, second = Sequence(0, 7, 9), Sequence(1, 7, 6)
    ledger.submit([first, second])
    ledger.advance(policy.next_step(ledger, 0.0))
    assert [len(s.blocks) for s in (first, second)] == [2, 2]
    ledger.advance(policy.next_step(ledger, 0.0))  # 8 tokens each: both blocks are full
    step = policy.next_step(ledger, 0.0)  # a third block for the first, none for the second
    assert step.decode == (first,) and not step.encode
    assert (second.status, second.cached, second.recomputed, second.blocks) == (PREEMPTED, 0, 2, [])
    assert ledger.preempted == [second]
    ledger.advance(step)
    while second.status is PREEMPTED:
        step = policy.next_step(ledger, 0.0)
        ended = ledger.advance(step)
    assert [(s.index, n) for s, n in step.encode] == [(1, 9)]  # its prompt of 7 and two tokens
    assert (second.status, second.generated) == (DECODE, 3)
    assert first.finished and not ended


def test_a_sequence_may_preempt_itself():
    ledger, policy = ledger_of(4), ChunkedPolicy(8, 5)
    running, late = Sequence(0, 8, 5), Sequence(1, 8, 2, 0.0)
    ledger.submit([running, late])
    seen = []
    while not ledger.idle:
        seen.append(late.status)
        ledger.advance(policy.next_step(ledger, 0.0))
        ledger.check()
    assert [*dict.fromkeys(seen)] == [WAITING, PREFILL, PREEMPTED, DECODE]


def test_what_the_pool_could_never_hold_is_refused():
    with pytest.raises(InputError, match="Request 0 needs 6 KV blocks"):
        ledger_of(5).submit([Sequence(0, 4, 20)])


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 12), st.integers(1, 5))
def test_iterations_until_shortage_are_as_many_as_one_by_one(cached, spare, size):
    pool = BlockPool(1000, size)
    sequences = []
    for i, tokens in enumerate(cached):
        sequence = Sequence(i, tokens, 99)
        sequence.cached, sequence.blocks = tokens, pool.allocate(pool.blocks_for(tokens + 1))
        sequences.append(sequence)
    pool.allocate(pool.available - spare)
    count, spare_left = 1, spare
    held = [len(s.blocks) for s in sequences]
    while True:
        missing = [pool.blocks_for(s.cached + count + 1) - h for s, h in zip(sequences, held, strict=True)]
        if sum(missing) > spare_left:
            break
        held = [h + m for h, m in zip(held, missing, strict=True)]
        spare_left -= sum(missing)
        count += 1
    assert iterations_until_shortage(pool, sequences) == count


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["orca", "chunked"]),
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(0, 40)), min_size=2, max_size=12),
    st.integers(8, 16),
)
def test_following_many_iterations_at_once_is_following_each(policy, rows, blocks):
    plan = schedule(policy, kv_blocks=blocks, admission="grow")
    requests = [RequestLengths(given, made, at / 1000) for given, made, at in rows]
    fast = replay(plan, profile(), requests, timeline=False)
    slow = replay(plan, profile(), requests, timeline=False, step_by_step=True)
    assert [one.index for one in fast.served] == [one.index for one in slow.served]
    for a, b in zip(fast.served, slow.served, strict=True):
        assert (a.start_s, a.first_token_s, a.finish_s) == pytest.approx((b.start_s, b.first_token_s, b.finish_s))


def test_with_enough_blocks_both_rules_are_one():
    requests = [RequestLengths(10 + i, 20 - i, 0.001 * i) for i in range(12)]
    for policy in ("orca", "chunked"):
        plans = (schedule(policy, kv_blocks=500, admission=rule) for rule in ("reserve", "grow"))
        reserve, grow = (replay(plan, profile(), requests, timeline=False) for plan in plans)
        assert reserve.served == grow.served


@pytest.mark.parametrize("policy", ["static", "rra", "hybrid"])
def test_policies_that_cannot_grow_say_so(policy):
    with pytest.raises(InputError, match="Admission 'grow' isn't there for policy"):
        make_ledger(schedule(policy, admission="grow"), fcfs)


def test_outputs_that_end_sooner_than_they_may_reserve_what_they_may_need():
    """Four times the output: reserving holds a fourth of the batch, growing holds it all."""
    requests = [RequestLengths(8, 12, 0.0) for _ in range(40)]
    plans = {rule: schedule("orca", kv_blocks=16, max_num_seqs=40, admission=rule) for rule in ("reserve", "grow")}
    told = {rule: replay(plan, profile(), requests, timeline=False, caps=[48] * 40) for rule, plan in plans.items()}
    known = replay(plans["reserve"], profile(), requests, timeline=False)
    assert all([one.output_tokens for one in done.served] == [12] * 40 for done in told.values())
    assert told["reserve"].seconds > 1.2 * known.seconds
    assert told["grow"].seconds < 1.2 * known.seconds
