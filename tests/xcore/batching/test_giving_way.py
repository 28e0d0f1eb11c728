"""Running sequences give way by rank: nothing is lost or leaked, and the last in the order keep no others out."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.xcore.small_specs import profile, schedule
from xcore.batching import BlockPool, Hints, Ledger, Preemption, PrefixPool, Sequence
from xcore.batching.sequence import DECODE, PREEMPTED, PREFILL
from xcore.errors import InputError
from xcore.orders import make_order
from xcore.policies.chunked import ChunkedPolicy
from xcore.policies.from_schedule import make_ledger
from xcore.policies.orca import OrcaPolicy
from xcore.specs.builtin_models import builtin_model
from xcore.specs.workload import RequestLengths
from xsimulator.cost.cost_model import HOST_LINK, ReplicaCost
from xsimulator.replay.event_simulator import replay

BLOCK = 4
MOST = 11
"""Blocks of the longest request."""
REQUESTS = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(0, 40), st.integers(0, 9)), min_size=1, max_size=12
)
"""Input and output tokens, arrival, and score."""
POLICIES = st.one_of(
    st.builds(OrcaPolicy, st.integers(1, 6), st.integers(1, 4)),
    st.builds(ChunkedPolicy, st.integers(1, 6), st.integers(6, 30)),
)
ACTIONS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 11), st.sampled_from(["stop", "cancel"])), max_size=4)
PREEMPTIONS = st.builds(Preemption, st.sampled_from([0, 3, 12, 1000]))
ADMISSIONS = st.sampled_from(["grow", "reserve"])


class Host:
    """Which tokens are in which block: every copy is made, and every step finds its sequences' own tokens."""

    def __init__(self, ledger):
        self.ledger, self.cache, self.kept = ledger, {}, {}

    def execute(self, swaps):
        for swap in swaps:
            if swap.to == "host":
                self.kept[swap.index] = [self.cache[block] for block in swap.blocks]
                continue
            kept = self.kept.pop(swap.index)
            if swap.to == "cache" and swap.blocks:
                self.cache |= dict(zip(swap.blocks, kept[-len(swap.blocks) :], strict=True))

    def compute(self, step):
        """Write all new tokens first: a sequence may share a block that another one computes in this step."""
        ends = {sequence: sequence.cached + count for sequence, count in (*step.encode, *((s, 1) for s in step.decode))}
        for sequence, end in ends.items():
            for token in range(sequence.cached, end):
                block = sequence.blocks[token // BLOCK]
                self.cache[block] = {**self.cache.get(block, {}), token % BLOCK: name_of(sequence, token)}
        for sequence, end in ends.items():
            for token in range(end):
                found = self.cache[sequence.blocks[token // BLOCK]][token % BLOCK]
                assert found == name_of(sequence, token), "its own keys and values"


def name_of(sequence, token):
    """What distinguishes a token's keys and values from others: the sequence, unless others begin alike."""
    number = token // BLOCK
    return sequence.keys[number] if number < len(sequence.keys) else sequence.index, token


def run(policy, ledger, requests, actions=(), keys=None):
    """Run requests through a policy, some stopped or cancelled at some moments; return the sequences."""
    sequences = [Sequence(i, *row[:3], hints=Hints(score=float(row[3]))) for i, row in enumerate(requests)]
    for sequence in sequences:
        tokens = sequence.input_tokens + sequence.max_output
        sequence.keys = [keys(sequence.index, n) for n in range(tokens // BLOCK)] if keys else ()
    ledger.submit(sequences)
    host, now, ended = Host(ledger), 0.0, []
    for moment in range(10_000):
        if ledger.idle:
            break
        for _, index, action in [entry for entry in actions if entry[0] == moment]:
            victim = sequences[index % len(sequences)]
            if not victim.finished and (action == "cancel" or victim.generated):
                getattr(ledger, action)(victim)
                ended.append(victim)
        ledger.observe(now)
        step = policy.next_step(ledger, now)
        ledger.check()
        assert ledger.residents <= policy.max_num_seqs
        if step:
            host.execute(ledger.giving_way.take_swaps())
            host.compute(step)
            assert all(s.status is DECODE for s in step.decode) and all(s.status is PREFILL for s, _ in step.encode)
            ended += ledger.advance(step)
        now += 1.0
    host.execute(ledger.giving_way.take_swaps())
    assert ledger.idle and not host.kept and not ledger.giving_way.on_host
    assert sorted(sequence.index for sequence in ended) == list(range(len(requests)))
    interrupted = {index % len(sequences) for _, index, _ in actions}
    assert all(s.generated == s.max_output for s in sequences if s.index not in interrupted)
    return sequences


@settings(max_examples=300, deadline=None)
@given(POLICIES, REQUESTS, st.integers(MOST, 16), ACTIONS, PREEMPTIONS, ADMISSIONS, st.booleans())
def test_nothing_is_lost_or_leaked_whoever_gives_way(policy, rows, blocks, actions, preemption, admission, guarded):
    order = make_order("learned", guarded)
    ledger = Ledger(BlockPool(blocks, BLOCK), order, admission=admission, preemption=preemption)
    run(policy, ledger, rows, actions)
    assert ledger.pool.available == blocks


@settings(max_examples=200, deadline=None)
@given(POLICIES, REQUESTS, st.integers(MOST, 16), ACTIONS, PREEMPTIONS, st.integers(0, 4))
def test_a_sequence_that_comes_back_shares_the_blocks_that_the_cache_still_has(
    policy, rows, blocks, actions, preemption, alike
):
    """The first `alike` blocks of all requests have equal tokens."""
    ledger = Ledger(PrefixPool(blocks, BLOCK), make_order("learned"), admission="grow", preemption=preemption)
    run(policy, ledger, rows, actions, lambda index, n: n if n < alike else (index, n))
    assert ledger.pool.available == blocks


@settings(max_examples=200, deadline=None)
@given(REQUESTS, st.integers(1, 5), st.integers(0, 1000))
def test_what_runs_is_the_best_prefix_of_the_order(rows, most, host_blocks):
    """With blocks for all, each arrival finds a free place, or takes that of the last resident if it is before it."""
    order, policy = make_order("learned"), OrcaPolicy(most, 4)
    ledger = Ledger(BlockPool(1000, BLOCK), order, preemption=Preemption(host_blocks))
    rows = [(*row[:2], 0, row[3]) for row in rows]
    sequences = [Sequence(i, *row[:3], hints=Hints(score=float(row[3]))) for i, row in enumerate(rows)]
    now = 0.0
    for arriving in sequences:
        ledger.submit([arriving])
        step = policy.next_step(ledger, now)
        ranks = [order.key(s, now) for s in ledger.resident]
        assert all(max(ranks) < order.key(s, now) for s in ledger.waiting) or len(ranks) < most
        ledger.advance(step)
        now += 1.0


def of(blocks, host_blocks, most=2, order="learned"):
    preemption = Preemption(host_blocks)
    return Ledger(BlockPool(blocks, BLOCK), make_order(order), preemption=preemption), OrcaPolicy(most, 2)


def turn(ledger, policy, now):
    step = policy.next_step(ledger, now)
    ledger.advance(step)
    return step


def test_a_swapped_sequence_goes_on_where_it_stopped_and_a_recomputed_one_is_prefilled_again():
    for host_blocks, prefilled in ((100, []), (0, [(0, 7 + 3)])):
        ledger, policy = of(100, host_blocks, most=1)
        bad, good = Sequence(0, 7, 9, 0.0, hints=Hints(score=0.0)), Sequence(1, 5, 2, 3.0, hints=Hints(score=1.0))
        ledger.submit([bad, good])
        for now in range(3):
            turn(ledger, policy, float(now))
        assert bad.generated == 3 and bad.cached == 9
        assert [s.index for s, _ in turn(ledger, policy, 3.0).encode] == [1]
        assert bad.status is PREEMPTED and bad.swapped == (3 if host_blocks else 0) and not bad.blocks
        swaps = ledger.giving_way.take_swaps()
        assert [(s.to, s.tokens, len(s.blocks)) for s in swaps] == ([("host", 9, 3)] if host_blocks else [])
        turn(ledger, policy, 4.0)  # good's second token, its last
        step = turn(ledger, policy, 5.0)
        assert [(s.index, n) for s, n in step.encode] == prefilled
        assert bool(step.decode) == bool(host_blocks) and bad.generated == 4


def test_no_resident_gives_way_in_vain():
    """The waiting one needs more blocks than those behind it would free."""
    ledger, policy = of(12, 100, most=8)
    first = Sequence(0, 20, 12, 0.0, hints=Hints(score=9.0))  # 8 blocks
    last = Sequence(1, 4, 5, 0.0, hints=Hints(score=0.0))  # 2 blocks
    ledger.submit([first, last])
    turn(ledger, policy, 0.0)
    ledger.submit([Sequence(2, 20, 12, 1.0, hints=Hints(score=5.0))])
    step = turn(ledger, policy, 1.0)
    assert not ledger.preemptions and {s.index for s in step.decode} == {0, 1}


@pytest.mark.parametrize(("beginning", "lengths"), [("high", (25, 4)), ("low", (48, 13)), ("own", (25, 4))])
def test_shared_blocks_do_not_count_as_freed(beginning, lengths):
    """10 blocks of the last resident: 8 are shared with one that stays, are found cached, or are of nobody else."""
    ledger = Ledger(PrefixPool(16, BLOCK), make_order("learned"), preemption=Preemption(100))
    policy = OrcaPolicy(8, 4)
    high, low = Sequence(0, 6, 3, 0.0, hints=Hints(score=9.0)), Sequence(1, 36, 5, 0.0, hints=Hints(score=0.0))
    high = Sequence(0, 36, 5, 0.0, hints=Hints(score=9.0)) if beginning == "high" else high
    first = Sequence(2, *lengths, 1.0, hints=Hints(score=5.0))
    for sequence, alike in ((high, beginning == "high"), (low, True), (first, beginning == "low")):
        sequence.keys = [("alike" if alike and number < 8 else sequence.index, number) for number in range(15)]
    ledger.submit([high, low, first])
    turn(ledger, policy, 0.0)
    turn(ledger, policy, 1.0)
    assert [s.index for s in ledger.giving_way.take_preempted()] == ([1] if beginning == "own" else [])


@pytest.mark.parametrize(("arrival_s", "pinned_at", "tokens"), [(9, 2, 32), (22, 23, 0)])
def test_a_swapped_sequence_comes_back_whatever_is_pinned(arrival_s, pinned_at, tokens):
    """Pins from before it grew are released for it, and while it is swapped, no pin takes the blocks that it needs."""
    ledger = Ledger(PrefixPool(20, BLOCK), make_order("learned"), admission="grow", preemption=Preemption(100))
    long, shortest = Sequence(0, 40, 40, 0.0, hints=Hints(score=0.0)), Sequence(1, 32, 1, 0.0, hints=Hints(score=9.0))
    short, policy = Sequence(2, 40, 2, float(arrival_s), hints=Hints(score=9.0)), OrcaPolicy(8, 4)
    for sequence in (long, shortest, short):
        sequence.keys = [(sequence.index, number) for number in range(20)]
    ledger.submit([long, shortest, short])
    for now in range(60):
        if (step := policy.next_step(ledger, float(now))) is not None:
            ledger.advance(step)
        if now == pinned_at:
            assert ledger.pin_prefixes("expected", (short if short.generated else shortest).keys) == tokens
        ledger.check()
    assert ledger.idle and ledger.giving_way.swapped == 1 and long.generated == 40


def test_a_promoted_sequence_does_not_give_way_until_its_quantum_is_used_up():
    order = make_order("learned", guarded=True)
    order.idle_steps, order.quantum = 5, 3
    ledger, policy = Ledger(BlockPool(100, BLOCK), order, preemption=Preemption(100)), OrcaPolicy(1, 1)
    ledger.submit([Sequence(0, 4, 20, 0.0, hints=Hints(score=0.0))])
    ledger.submit([Sequence(i, 4, 4, float(i), hints=Hints(score=1.0)) for i in range(1, 12)])
    ran = []
    for now in range(40):
        ledger.observe(float(now))
        step = policy.next_step(ledger, float(now))
        ran.append(next(s.index for s in (*(s for s, _ in step.encode), *step.decode)))
        ledger.advance(step)
    stints = [len(list(stint)) for index, stint in itertools.groupby(ran) if index == 0]
    assert stints[0] == 1, "gives way to the second request at once"
    assert stints[1] == 3, "then runs for its quantum among better ones"


def test_a_replay_sees_the_room_of_a_waiting_request_go():
    """Residents take the free blocks of a waiting request while they decode, so one of them gives way to it."""
    lengths = [(13, 14, 0.0089), (28, 15, 0.0277), (15, 1, 0.0437), (24, 19, 0.009), (17, 23, 0.0072), (5, 9, 0.004)]
    rows = [RequestLengths(*row) for row in lengths]
    controls = {"max_num_seqs": 5, "prefills_per_step": 2}
    plan, costs = schedule("orca", kv_blocks=19, block_size=8, admission="grow", **controls), profile()
    hints = [Hints(output_tokens=row.output) for row in rows]
    how = {"order": make_order("sjf"), "hints": hints, "preemption": Preemption(1000)}
    stepped = replay(plan, costs, rows, step_by_step=True, **how)
    assert stepped.preemptions and replay(plan, costs, rows, **how).served == stepped.served


def test_policies_and_models_without_it_are_refused():
    rra = schedule("rra", encode_batch=2, decode_batch=4, decode_iterations=2)
    with pytest.raises(InputError, match="Under policy rra, running requests can't give way"):
        make_ledger(rra, make_order("fcfs"), preemption=Preemption())
    with pytest.raises(InputError, match="'t5-small' is an encoder-decoder, whose running requests can't give way"):
        make_ledger(schedule("orca", builtin_model("t5-small")), make_order("fcfs"), preemption=Preemption())


def test_a_replay_charges_the_copies_both_ways():
    """One slot: the long request gives way to the short one, and ends later by the short one's time and two copies."""
    plan, costs = schedule("orca", max_num_seqs=1, prefills_per_step=1, kv_blocks=200), profile()
    cost = ReplicaCost.of(plan, costs)
    alone = {row: replay(plan, costs, [RequestLengths(*row)]).seconds for row in ((20, 40), (10, 5))}
    rows = [RequestLengths(20, 40, 0.0), RequestLengths(10, 5, alone[20, 40] / 2)]
    hints = [Hints(score=-float(row.output)) for row in rows]
    how = {"order": make_order("learned"), "hints": hints, "preemption": Preemption(1000)}
    done = {s.index: s for s in replay(plan, costs, rows, step_by_step=True, **how).served}
    assert done[0].preemptions == 1 and done[1].finish_s < done[0].finish_s
    lost = done[0].finish_s - alone[20, 40] - alone[10, 5]
    assert any(lost == pytest.approx(2 * cost.swap_seconds(tokens)) for tokens in range(37, 44))
    assert replay(plan, costs, rows, **how).served == replay(plan, costs, rows, step_by_step=True, **how).served
    byte = cost.kv_transfer_link[0]
    assert cost.swap_seconds(40) == pytest.approx(40 * byte / HOST_LINK.bandwidth_bytes_s + HOST_LINK.latency_s)
