"""Admission by *grow*: blocks come as tokens do, and the last resident is preempted where none are left."""

from math import inf
from typing import get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.xcore.small_specs import profile, schedule
from xcore.batching import BlockPool, Forecast, Ledger, Sequence, Step
from xcore.batching.admission import ADMISSIONS, Admission, iterations_until_shortage
from xcore.batching.sequence import DECODE, PREEMPTED, PREFILL, WAITING
from xcore.errors import InputError
from xcore.orders import fcfs
from xcore.policies.chunked import ChunkedPolicy
from xcore.policies.joining import Joining
from xcore.policies.orca import OrcaPolicy
from xcore.policies.rra import RRAPolicy
from xcore.policies.static import StaticPolicy
from xcore.policies.waa import WAAPolicy
from xcore.specs.cluster import parse_cluster
from xcore.specs.schedule import Stage
from xcore.specs.workload import LengthDistribution, RequestLengths
from xsimulator.replay.event_simulator import replay

BLOCK = 4
REQUESTS = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 20), st.sampled_from([0.0, 0.0, 3.0, 10.0])), min_size=1, max_size=12
)
STAGES = {
    "pipeline": (Stage((0,), 1, "both", None, (0, 7)), Stage((1,), 1, "both", None, (7, 12))),
    "waa-c": (Stage((0,), 1, "encode", None, (0, 12)), Stage((1,), 1, "decode", None, (0, 12))),
}
FORECAST = Forecast(LengthDistribution.from_samples([3, 5, 8, 13, 20]), 4)
JOINING = Joining(10.0, forecast=FORECAST)
POLICIES = st.one_of(
    st.builds(OrcaPolicy, st.integers(1, 8), st.integers(1, 4)),
    st.builds(ChunkedPolicy, st.integers(1, 8), st.integers(1, 30)),
    st.builds(StaticPolicy, st.integers(1, 6)),
    st.builds(RRAPolicy, st.integers(1, 6), st.integers(1, 6), st.just(JOINING)),
    st.builds(WAAPolicy, st.integers(1, 6), st.just(JOINING)),
)
ACTIONS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 11), st.sampled_from(["stop", "cancel"])), max_size=4)


def ledger_of(blocks, **kind):
    return Ledger(BlockPool(blocks, BLOCK), fcfs, admission="grow", **kind)


class Stages:
    """A policy at work on a ledger: where it is disaggregated, keys and values arrive three moments later."""

    def __init__(self, policy, blocks, encoder_decoder):
        self.policy, self.now, self.ended = policy, 0.0, []
        disaggregated = isinstance(policy, WAAPolicy)
        early = not isinstance(policy, StaticPolicy)
        self.ledger = ledger_of(
            blocks, early_termination=early, encoder_decoder=encoder_decoder, disaggregated=disaggregated
        )
        self.phases = ("encode", "decode") if disaggregated else ("both",)
        self.coming = []

    def turn(self):
        """One moment: what has come, then a step of every lane; whether there was one."""
        for due, batch in [entry for entry in self.coming if entry[0] <= self.now]:
            self.ledger.arrived(batch, self.now)
            self.coming.remove((due, batch))
        steps = [self.lane(phase) for phase in self.phases]
        self.now += 1.0
        return any(steps) or bool(self.coming)

    def lane(self, phase):
        step = self.policy.next_step(self.ledger, self.now, phase)
        if step is None:
            return False
        assert step.encode or step.decode
        counts = [(s, 1 + s.behind) for s in step.decode if not s.finished]
        for sequence, count in (*step.encode, *counts):
            assert len(sequence.blocks) * BLOCK >= sequence.cached + count, "every token has a slot"
            assert sequence.cached + count <= sequence.input_tokens + sequence.max_output, "no token is beyond its end"
        if phase == "encode":
            batch = [sequence for sequence, _ in step.encode]
            for sequence in batch:
                sequence.kv_arrived_s = inf
            self.coming.append((self.now + 3.0, batch))
        self.ended += self.ledger.advance(step)
        self.ledger.check()
        return True


def check_interleaving(policy, requests, blocks, actions, encoder_decoder):
    """Requests through a policy, some stopped or cancelled at some moments; how many were preempted."""
    stages = Stages(policy, blocks, encoder_decoder and not isinstance(policy, ChunkedPolicy))
    ledger = stages.ledger
    sequences = [Sequence(i, *request) for i, request in enumerate(requests)]
    ledger.submit(sequences)
    for moment in range(10_000):
        if ledger.idle and not stages.coming:
            break
        for _, index, action in [entry for entry in actions if entry[0] == moment]:
            victim = sequences[index % len(sequences)]
            if not victim.finished and (action == "cancel" or victim.generated):
                getattr(ledger, action)(victim)
                ledger.check()
                stages.ended.append(victim)
        if not stages.turn():
            stages.now = max(stages.now, ledger.waiting.next_arrival(stages.now) or 0.0)
    assert ledger.idle and ledger.pool.available == blocks
    assert sorted(sequence.index for sequence in stages.ended) == list(range(len(requests)))
    for sequence, (_, output, _) in zip(sequences, requests, strict=True):
        interrupted = any(i % len(sequences) == sequence.index for _, i, _ in actions)
        assert interrupted or sequence.generated == output
    return ledger.preemptions


@settings(max_examples=300, deadline=None)
@given(POLICIES, REQUESTS, st.integers(11, 16), ACTIONS, st.booleans())
def test_nothing_is_lost_or_leaked_whoever_is_preempted_stopped_or_cancelled(policy, requests, blocks, actions, both):
    """11 blocks hold the longest request alone, with an encoder-decoder's start token."""
    check_interleaving(policy, requests, blocks, actions, both)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None)
@given(POLICIES, REQUESTS, st.integers(11, 16), ACTIONS, st.booleans())
def test_nothing_is_lost_or_leaked_in_many_interleavings(policy, requests, blocks, actions, both):
    check_interleaving(policy, requests, blocks, actions, both)


MANY = [OrcaPolicy(8, 4), ChunkedPolicy(8, 30), StaticPolicy(6), RRAPolicy(6, 6), WAAPolicy(6)]


@pytest.mark.parametrize("policy", MANY)
def test_every_policy_preempts_where_blocks_are_few(policy):
    assert check_interleaving(policy, [(8, 20, 0.0)] * 8, 11, [], False) > 2


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
    assert ledger.giving_way.take_preempted() == [second] and ledger.giving_way.take_preempted() == []
    ledger.advance(step)
    while second.status is PREEMPTED:
        step = policy.next_step(ledger, 0.0)
        ended = ledger.advance(step)
    assert [(s.index, n) for s, n in step.encode] == [(1, 9)]  # its prompt of 7 and two tokens
    assert (second.status, second.generated) == (DECODE, 3)
    assert first.finished and not ended
    assert ledger.preemptions == 1


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


class ShortestFirst:
    changes = False

    def key(self, sequence, now):
        return sequence.input_tokens


@pytest.mark.parametrize("policy", [OrcaPolicy(8, 4), ChunkedPolicy(8, 30)])
def test_a_step_that_preempts_admits_nobody(policy):
    """Else a short prompt that may go first gets the blocks that another was preempted for."""
    ledger, now, preempting = Ledger(BlockPool(11, BLOCK), ShortestFirst(), admission="grow"), 0.0, 0
    ledger.submit([Sequence(i, 8, 20) for i in range(6)] + [Sequence(6 + i, 1, 3, 0.5 * i) for i in range(100)])
    while not ledger.idle:
        residents = set(ledger.resident)
        step = policy.next_step(ledger, now)
        now += 1.0
        if ledger.giving_way.take_preempted():
            preempting += 1
            assert {sequence for sequence, _ in step.encode} <= residents
        ledger.advance(step)
    assert preempting > 2


@pytest.mark.parametrize("most", range(5))
def test_the_first_so_many_are_decoded_and_they_alone_get_blocks(most):
    ledger = ledger_of(8)
    residents = [Sequence(i, BLOCK, 9) for i in range(3)]
    ledger.submit(residents)
    ledger.advance(Step(encode=tuple((s, BLOCK) for s in ledger.admit(3, 0.0))))
    assert ledger.grow_decoding(0.0, most) == (tuple(residents[:most]), [])
    assert [len(s.blocks) for s in residents] == [2 if i < most else 1 for i in range(3)]


@pytest.mark.parametrize("kind", [{}, {"disaggregated": True}])
def test_keys_and_values_are_waited_for_where_they_come_from_other_devices(kind):
    ledger = ledger_of(20, **kind)
    ledger.submit(Sequence(i, 8, 5) for i in range(2))
    first, second = ledger.admit(2, 0.0)
    ledger.advance(Step(encode=((first, 8), (second, 8))))
    second.kv_arrived_s = 3.0
    assert ledger.grow_decoding(2.0)[0] == ((first,) if kind else (first, second))
    assert ledger.grow_decoding(3.0)[0] == (first, second)


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


WAKES = [(24, 28, 5), *[(1, 1, 0)] * 4, (1, 18, 16), (1, 1, 0), (50, 16, 16), (7, 12, 5)]
"""One is preempted and its blocks let encoding go on, from which another one joins in the midst of the row."""


ALONE = [(1, 9, 1), (1, 38, 1), (1, 49, 1), (17, 26, 0), (17, 26, 0), (60, 38, 1)]
"""The last request is preempted, and alone in the end: it needs 7 of 9 blocks, and a normal's quantile is above 9."""


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["orca", "chunked", "static", "hybrid", "rra", "waa-c"]),
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(0, 40)), min_size=2, max_size=12),
    st.integers(8, 16),
    st.booleans(),
)
@example("waa-c", WAKES, 9, False)
@example("rra", ALONE, 9, False)
def test_following_many_iterations_at_once_is_following_each(policy, rows, blocks, pipeline):
    two = {"cluster": parse_cluster("2xA40"), "stages": STAGES["waa-c" if policy == "waa-c" else "pipeline"]}
    plan = schedule(policy, kv_blocks=blocks, admission="grow", **(two if pipeline or policy == "waa-c" else {}))
    requests = [RequestLengths(given, made, at / 1000) for given, made, at in rows]
    fast = replay(plan, profile(), requests, timeline=False, lanes=True)
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


def test_outputs_that_end_sooner_than_they_may_reserve_what_they_may_need():
    """Four times the output: reserving holds a fourth of the batch, growing holds it all."""
    requests = [RequestLengths(8, 12, 0.0) for _ in range(40)]
    plans = {rule: schedule("orca", kv_blocks=16, max_num_seqs=40, admission=rule) for rule in ("reserve", "grow")}
    told = {rule: replay(plan, profile(), requests, timeline=False, caps=[48] * 40) for rule, plan in plans.items()}
    known = replay(plans["reserve"], profile(), requests, timeline=False)
    assert all([one.output_tokens for one in done.served] == [12] * 40 for done in told.values())
    assert told["reserve"].seconds > 1.2 * known.seconds
    assert told["grow"].seconds < 1.2 * known.seconds


def test_every_rule_of_admission_that_a_schedule_can_name_has_its_class():
    """The ledger and --admission look rules up in this table."""
    assert tuple(ADMISSIONS) == get_args(Admission)
