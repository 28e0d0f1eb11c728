"""The pool of blocks that are found by their contents: beside a plain queue, and under policies that share them."""

import dataclasses
from collections import Counter
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.xcore.small_specs import profile, schedule
from xcore.batching import BlockPool, Ledger, MicroBatching, PrefixPool, Sequence
from xcore.batching.prefix_pool import extend_keys
from xcore.batching.sequence import PREEMPTED
from xcore.errors import InputError
from xcore.orders import fcfs
from xcore.policies.chunked import ChunkedPolicy
from xcore.policies.from_schedule import make_ledger
from xcore.policies.orca import OrcaPolicy
from xcore.specs.workload import RequestLengths
from xsimulator.replay.event_simulator import replay

BLOCK = 4


def keys_of(tokens, block_size=BLOCK):
    keys = []
    extend_keys(keys, tokens, block_size)
    return keys


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("apfh"), st.integers(0, 5)), max_size=80), st.integers(1, 9))
def test_the_same_blocks_as_of_one_queue_of_free_ones(actions, total):
    """vLLM's queue: unpublished blocks come back to its front, published ones to its end."""
    pool, queue, held, contents = PrefixPool(total, BLOCK), list(range(total)), [], {}
    for action, number in actions:
        if action == "a" and number <= len(queue):
            taken, queue = queue[:number], queue[number:]
            assert pool.allocate(number) == taken
            contents = {block: key for block, key in contents.items() if block not in taken}
            held.append(taken)
        elif action == "p" and (bare := [block for blocks in held for block in blocks if block not in contents]):
            contents[bare[number % len(bare)]] = number
            pool.publish(bare[number % len(bare)], number)
        elif action == "f" and held:
            blocks = held.pop(number % len(held))
            pool.free(blocks)
            for block in reversed([block for block in blocks if not any(block in others for others in held)]):
                queue = [*queue, block] if block in contents else [block, *queue]
        elif action == "h":
            found = pool.find([number])
            assert [contents[block] for block in found] == [number] * (number in contents.values())
            assert pool.free_among(found) == len({*found} & {*queue})
            pool.hold(found)
            held.append(found)
            queue = [block for block in queue if block not in found]
        assert pool.available == len(queue)
        pool.check(Counter(block for blocks in held for block in blocks))


def test_what_is_wrong_is_refused():
    pool = PrefixPool(3, BLOCK)
    (block,) = pool.allocate(1)
    pool.publish(block, "a")
    with pytest.raises(ValueError, match="already published"):
        pool.publish(block, "b")
    with pytest.raises(ValueError, match="it is free"):
        pool.publish(2, "b")
    with pytest.raises(MemoryError, match="3 KV blocks were asked for, 2 of 3 are free"):
        pool.allocate(3)
    pool.free([block])
    with pytest.raises(ValueError, match="no sequence held it"):
        pool.free([block])
    with pytest.raises(AssertionError, match="the pool counts"):
        pool.check(Counter([block]))
    with pytest.raises(InputError, match="at least 1"):
        PrefixPool(0, 16)


def test_the_end_of_a_prefix_is_forgotten_before_its_beginning():
    pool = PrefixPool(4, BLOCK)
    blocks = pool.allocate(3)
    for block, key in zip(blocks, "abc", strict=True):
        pool.publish(block, key)
    pool.free(blocks)
    assert pool.find("abc") == blocks and pool.find("bc") == blocks[1:] and pool.find("xbc") == []
    pool.allocate(2)  # the one that was never held, and the last of the three
    assert pool.find("abc") == blocks[:2]


def test_equal_keys_mean_equal_beginnings():
    first, other = keys_of([1, 2, 3, 4, 5, 6, 7, 8, 9]), keys_of([1, 2, 3, 4, 5, 6, 7, 9])
    assert len(first) == 2 and first[0] == other[0] and first[1] != other[1]
    assert keys_of([5, 6, 7, 8]) != keys_of([1, 2, 3, 4, 5, 6, 7, 8])[1:]
    grown = keys_of([1, 2, 3, 4])
    extend_keys(grown, [1, 2, 3, 4, 5, 6, 7, 8], BLOCK)
    assert grown == first
    assert [len(keys_of(range(n))) for n in range(3 * BLOCK)] == [n // BLOCK for n in range(3 * BLOCK)]


class Text:
    """A sequence's tokens; each next one follows from all before, so equal beginnings go on alike."""

    def __init__(self, prompt):
        self.prompt, self.output = list(prompt), []

    @property
    def tokens(self):
        return self.prompt + self.output

    def go_on(self):
        self.output.append(sha256(str(self.tokens).encode()).digest()[0] % 2)


PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=20), st.integers(1, 20), st.sampled_from([0.0, 3.0])),
    min_size=1,
    max_size=12,
)
POLICIES = st.one_of(
    st.builds(OrcaPolicy, st.integers(1, 8), st.integers(1, 4)),
    st.builds(ChunkedPolicy, st.integers(1, 8), st.integers(1, 30)),
)
ACTIONS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 11), st.sampled_from(["stop", "cancel"])), max_size=4)


def compute(cache, texts, micro_batch):
    """Write all rows of a micro-batch, then let each sequence read all its tokens, as attention does."""
    rows = [*micro_batch.encode, *((sequence, 1) for sequence in micro_batch.decode)]
    for sequence, count in rows:
        for at in range(sequence.cached, sequence.cached + count):
            cache[sequence.blocks[at // BLOCK], at % BLOCK] = texts[sequence.index].tokens[: at + 1]
    for sequence, count in rows:
        for at in range(sequence.cached + count):
            read = cache[sequence.blocks[at // BLOCK], at % BLOCK]
            assert read == texts[sequence.index].tokens[: at + 1], "what is read is what was written for these tokens"


@settings(max_examples=400, deadline=None)
@given(
    POLICIES,
    PROMPTS,
    st.integers(10, 16),
    ACTIONS,
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from(["grow", "reserve"]),
)
def test_sequences_read_their_own_tokens_and_nothing_leaks(policy, rows, blocks, actions, count, late, admission):
    """Whoever is preempted, stopped or cancelled; with one micro-batch or more; with keys that come a step late."""
    ledger = Ledger(PrefixPool(blocks, BLOCK), fcfs, admission=admission, shares_in_step=count == 1)
    texts = [Text(prompt) for prompt, _, _ in rows]
    sequences = [
        Sequence(i, len(prompt), output, arrival, keys=keys_of(prompt))
        for i, (prompt, output, arrival) in enumerate(rows)
    ]
    ledger.submit(sequences)
    micro_batching, cache, ended, now = MicroBatching(count), {}, [], 0.0
    for number in range(10_000):
        if ledger.idle:
            break
        for _, index, action in [one for one in actions if one[0] == number]:
            victim = sequences[index % len(sequences)]
            if victim not in ended and (action == "cancel" or victim.generated):
                getattr(ledger, action)(victim)
                ended.append(victim)
        step = policy.next_step(ledger, now)
        now += 1.0
        if step is None:
            continue
        for micro_batch in micro_batching.split(step):
            compute(cache, texts, micro_batch)
        known = [len(text.tokens) for text in texts]
        ended += ledger.advance(step)
        for sequence, text in zip(sequences, texts, strict=True):
            while len(text.output) < sequence.generated:
                text.go_on()
            extend_keys(sequence.keys, text.tokens[: known[sequence.index] if late else None], BLOCK)
        ledger.check()
    assert ledger.idle and ledger.pool.available == blocks
    assert sorted(sequence.index for sequence in ended) == list(range(len(rows)))


def test_a_preempted_sequence_finds_its_own_blocks():
    ledger, policy = Ledger(PrefixPool(5, BLOCK), fcfs, admission="grow"), ChunkedPolicy(8, 64)
    first, second = (Sequence(i, 7, output, keys=range(100 * i, 100 * i + 9)) for i, output in ((0, 9), (1, 6)))
    ledger.submit([first, second])
    while second.status is not PREEMPTED:
        step = policy.next_step(ledger, 0.0)
        ledger.advance(step)
    assert not ledger.reused
    while second.status is PREEMPTED:
        step = policy.next_step(ledger, 0.0)
        ledger.advance(step)
    assert [(s.index, count) for s, count in step.encode] == [(1, 5)]  # of its 9, 4 have survived
    assert ledger.reused == 4


def test_a_whole_prompt_in_the_cache_leaves_its_last_token():
    ledger, policy = Ledger(PrefixPool(20, BLOCK), fcfs), OrcaPolicy(8, 4)
    ledger.submit([Sequence(i, tokens, 3, keys=range(9)) for i, tokens in enumerate([8, 8, 9])])
    step = policy.next_step(ledger, 0.0)
    assert [count for _, count in step.encode] == [8, 4, 1]  # of the same step: written before it is read
    assert ledger.pool.available == 20 - 3 - 2 - 1, "the first's three; two and one beside what is shared"


REQUESTS = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(0, 40), st.integers(0, 2)), min_size=2, max_size=12
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["orca", "chunked"]), REQUESTS, st.integers(8, 16), st.booleans())
def test_following_many_iterations_at_once_is_following_each(policy, rows, blocks, known):
    plan = schedule(policy, kv_blocks=blocks, admission="grow", prefix_caching=True)
    requests = [RequestLengths(tokens, made, at / 1000) for tokens, made, at, _ in rows]
    prompts = [[kind] * tokens for tokens, _, _, kind in rows] if known else None
    fast = replay(plan, profile(), requests, timeline=False, lanes=True, prompts=prompts)
    slow = replay(plan, profile(), requests, timeline=False, prompts=prompts, step_by_step=True)
    assert [one.index for one in fast.served] == [one.index for one in slow.served]
    assert fast.reused == slow.reused
    for a, b in zip(fast.served, slow.served, strict=True):
        assert (a.start_s, a.first_token_s, a.finish_s) == pytest.approx((b.start_s, b.first_token_s, b.finish_s))


def test_withdrawn_keys_find_no_block_whoever_has_it():
    pool = PrefixPool(6, BLOCK)
    held, kept = pool.allocate(2), pool.allocate(2)
    for blocks in (held, kept):
        pool.publish(blocks[0], "first")
        pool.publish(blocks[1], "second")
    pool.free(kept)
    pool.withdraw(["first", "never published"])
    assert pool.find(["first", "second"]) == [] and pool.find(["second"]) == [held[1]]
    pool.check(Counter(held))
    pool.free(held)
    pool.check(Counter())
    assert pool.available == 6 and len(set(pool.allocate(6))) == 6


def test_a_sequence_that_failed_leaves_nothing_to_be_found():
    """Whether it is resident, preempted, or has ended by its length before its failure is known."""
    tokens = list(range(12))
    for ending in ("resident", "preempted", "finished"):
        ledger = Ledger(PrefixPool(20, BLOCK), fcfs, admission="grow")
        failing, other = (Sequence(i, 12, 1 + (ending != "finished"), keys=keys_of(tokens)) for i in range(2))
        ledger.submit([failing, other])
        policy = OrcaPolicy(max_num_seqs=1, prefills_per_step=1)
        ledger.advance(policy.next_step(ledger, 0.0))
        if ending == "preempted":
            ledger.giving_way.preempt(failing, 0.0)
        assert ledger.pool.find(failing.keys)
        ledger.fail(failing)
        assert failing.finished and not failing.blocks and ledger.pool.find(other.keys) == []
        ledger.check()
        while not ledger.idle:
            ledger.advance(policy.next_step(ledger, 0.0))
        assert ledger.reused == 0 and ledger.pool.available == 20


@pytest.mark.parametrize("policy", ["orca", "chunked"])
def test_prompts_that_begin_alike_are_prefilled_once(policy):
    requests = [RequestLengths(100, 10, 0.001 * i) for i in range(12)]
    plain = schedule(policy, kv_blocks=500, admission="grow")
    caching = dataclasses.replace(plain, prefix_caching=True)
    alike = [[0] * 80 + [i] * 20 for i in range(12)]
    off, apart, shared = (
        replay(plan, profile(), requests, prompts=prompts)
        for plan, prompts in ((plain, alike), (caching, None), (caching, alike))
    )
    assert off.served == apart.served and apart.reused == 0
    assert shared.reused == 11 * 80
    prefilled = [sum(s.tokens for s in one.timeline.spans if s.phase != "decode") for one in (apart, shared)]
    assert shared.seconds < 0.9 * apart.seconds and prefilled[1] < prefilled[0] - 800


def test_a_replay_without_prompts_finds_but_the_blocks_of_preempted_requests():
    plan = schedule("chunked", kv_blocks=12, admission="grow", prefix_caching=True)
    plans = plan, dataclasses.replace(plan, kv_blocks=500)
    few, enough = (replay(one, profile(), [RequestLengths(40, 50)] * 6) for one in plans)
    assert few.preemptions and few.reused
    assert not enough.preemptions and not enough.reused


@pytest.mark.parametrize("policy", ["static", "rra", "hybrid"])
def test_policies_that_prefill_whole_prompts_say_so(policy):
    with pytest.raises(InputError, match=f"Policy {policy} can't cache prefixes.*orca, chunked"):
        make_ledger(schedule(policy, prefix_caching=True), fcfs)


def test_without_prefix_caching_nothing_is_kept():
    assert isinstance(make_ledger(schedule("orca"), fcfs).pool, BlockPool)
    assert isinstance(make_ledger(schedule("orca", prefix_caching=True), fcfs).pool, PrefixPool)


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 30), st.lists(st.integers(0, 1), min_size=1, max_size=24), st.integers(1, 16), st.booleans()
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=400, deadline=None)
@given(POLICIES, ARRIVALS, st.integers(10, 16), st.integers(1, 3), st.sampled_from(["grow", "reserve"]))
def test_pinned_blocks_stay_until_their_sequence_starts_and_none_leaks(policy, rows, total, count, admission):
    """Sequences arrive while others run and may be cancelled; every one of them comes to its end.

    With reserved blocks, each finds at least what it has pinned. With growing ones a pin may be given up, but only for
    a sequence that is alone.
    """
    pool = PrefixPool(total, BLOCK)
    ledger = Ledger(pool, fcfs, admission=admission, shares_in_step=count == 1)
    todo, pinned, given_up, now = sorted(enumerate(rows), key=lambda row: row[1][0]), {}, set(), 0.0
    unpin = ledger.pins.remove_newest

    def watched(other):
        assert ledger.residents <= 1, "others can be preempted"
        before = ledger.pins.holders
        done = unpin(other)
        given_up.update({*before} - {*ledger.pins.holders})
        return done

    ledger.pins.remove_newest = watched
    ended = set()
    for number in range(10_000):
        while todo and todo[0][1][0] <= number:
            index, (_, prompt, most, cancelled) = todo.pop(0)
            sequence = Sequence(index, len(prompt), most, now, keys=keys_of(prompt))
            ledger.submit([sequence])
            pinned[sequence] = ledger.pin(sequence)
            assert pinned[sequence] in (0, len(ledger.cached_blocks(sequence)) * BLOCK)
            if cancelled:
                victim = next(reversed(ledger.pins.holders), sequence)
                if victim not in ended:
                    ledger.cancel(victim)
                    ended.add(victim)
        waiting = [s for s in pinned if s.status.value == "waiting" and s not in ended]
        for sequence in waiting:
            if sequence not in given_up:
                assert len(pool.find(sequence.keys)) * BLOCK >= pinned[sequence]
        step = policy.next_step(ledger, now)
        for sequence in waiting:
            if sequence.status.value == "prefill" and sequence not in given_up:
                assert sequence.hit >= pinned[sequence]
        now += 1.0
        if step is not None:
            ended.update(ledger.advance(step))
        ledger.check()
        if not todo and ledger.idle:
            break
    assert ledger.idle and not ledger.pins.holders and len(ended) == len(rows)
    assert not given_up or admission == "grow"
    pool.check(Counter())


def test_a_sequence_that_outgrows_all_other_blocks_takes_pinned_ones():
    """Alone, it can't be preempted for others: it would return at once, and so on for ever."""
    pool, policy = PrefixPool(8, BLOCK), OrcaPolicy(1, 1)
    ledger = Ledger(pool, fcfs, admission="grow")
    first = Sequence(0, 9, 1, keys=keys_of(range(9)))
    ledger.submit([first])
    ledger.advance(policy.next_step(ledger, 0.0))
    growing, waiting = Sequence(1, 2, 31, keys=()), Sequence(2, 9, 1, keys=keys_of(range(9)))
    ledger.submit([growing])
    ledger.advance(policy.next_step(ledger, 1.0))
    ledger.submit([waiting])
    assert ledger.pin(waiting) == 8
    for number in range(40):
        if step := policy.next_step(ledger, 2.0 + number):
            ledger.advance(step)
        ledger.check()
    assert ledger.idle and growing.generated == 31 and not growing.preemptions and waiting.hit == 0


def test_a_pin_leaves_enough_blocks_for_each_sequence_alone():
    pool = PrefixPool(10, BLOCK)
    ledger = Ledger(pool, fcfs, admission="reserve")
    first = Sequence(0, 16, 1, keys=keys_of(range(16)))
    ledger.submit([first])
    policy = OrcaPolicy(1, 1)
    ledger.advance(policy.next_step(ledger, 0.0))  # it ends; its four blocks stay in the cache
    large = Sequence(1, 28, 1, keys=keys_of(range(100, 128)))
    again = Sequence(2, 17, 1, keys=keys_of(range(17)))
    ledger.submit([large, again])
    assert ledger.pin(large) == 0 and ledger.pin(again) == 0  # seven and four are more than ten
    ledger.cancel(large)
    assert ledger.pin(again) == 16 and pool.available == 6
    ledger.advance(policy.next_step(ledger, 1.0))
    assert again.hit == 16 and not ledger.pins.holders and pool.available == 10


def test_only_sequences_with_the_same_salt_share_blocks():
    plain, salted, other = list[bytes](), list[bytes](), list[bytes]()
    for keys, salt in ((plain, None), (salted, "a"), (other, "b")):
        extend_keys(keys, range(12), BLOCK, salt)
    assert plain == keys_of(range(12)) and len({*plain, *salted, *other}) == 9
    begun = salted[:1]
    extend_keys(begun, range(12), BLOCK, "a")
    assert begun == salted


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("apfhwt"), st.integers(0, 5)), max_size=60), st.integers(1, 9))
def test_the_changes_of_the_cache_say_which_keys_can_be_found(actions, total):
    """A mirror that follows them always has the keys that the pool finds."""
    pool, mirror, held = PrefixPool(total, BLOCK), set(), []
    pool.record_changes()
    for action, number in actions:
        if action == "a" and number <= pool.available:
            held.append(pool.allocate(number))
        elif action == "p" and (bare := [b for blocks in held for b in blocks if b not in pool._keys]):
            pool.publish(bare[number % len(bare)], number)
        elif action == "f" and held:
            pool.free(held.pop(number % len(held)))
        elif action == "h":
            found = pool.find([number])
            pool.hold(found)
            held.append(found)
        elif action == "w":
            pool.withdraw([number])
        found, lost = pool.take_changes()
        mirror = (mirror | set(found)) - set(lost)
        assert mirror == {key for key in range(6) if pool.find([key])}
    unwatched = PrefixPool(2, BLOCK)
    unwatched.publish(unwatched.allocate(1)[0], 1)
    assert unwatched.take_changes() == ([], []) == unwatched.take_changes()
