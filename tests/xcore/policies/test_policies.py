"""Every policy, over random requests: nothing lost, nothing twice, no block leaked, and each one's own promise kept."""

import copy
import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.xcore.small_specs import changed, schedule
from xcore.batching import BlockPool, Ledger, Sequence, Step
from xcore.errors import InputError
from xcore.orders import fcfs
from xcore.policies import TRAITS, Traits, runs
from xcore.policies.chunked import ChunkedPolicy
from xcore.policies.control import Control, kinds
from xcore.policies.from_schedule import make_ledger, make_policy
from xcore.policies.hybrid import HybridPolicy
from xcore.policies.orca import OrcaPolicy
from xcore.policies.rra import RRAPolicy
from xcore.policies.static import StaticPolicy
from xcore.policies.waa import WAAPolicy
from xcore.specs.builtin_models import builtin_model
from xcore.specs.engine_spec import ENGINES
from xcore.specs.workload import MAX_TOKENS

REQUESTS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 25), st.sampled_from([0.0, 0.0, 3.0, 10.0])), min_size=1, max_size=30
)
POLICIES = st.one_of(
    st.builds(StaticPolicy, st.integers(1, 8)),
    st.builds(HybridPolicy, st.integers(1, 8)),
    st.builds(OrcaPolicy, st.integers(1, 8), st.integers(1, 4)),
    st.builds(ChunkedPolicy, st.integers(1, 8), st.integers(1, 30)),
    st.builds(RRAPolicy, st.integers(1, 6), st.integers(1, 10)),
)


def drive(policy, requests, blocks=12, block_size=8, encoder_decoder=False):
    """Run the requests to the end, one second a step; returns the steps and the sequences with their finish steps."""
    ledger = Ledger(BlockPool(blocks, block_size), fcfs, not isinstance(policy, StaticPolicy), encoder_decoder)
    sequences = [Sequence(i, prompt, output, arrival) for i, (prompt, output, arrival) in enumerate(requests)]
    ledger.submit(sequences)
    now, steps, finished = 0.0, [], []
    while not ledger.idle:
        step = policy.next_step(ledger, now)
        if step is None:
            now = ledger.waiting.next_arrival(now)
            assert now is not None, "nothing can run and nothing will arrive"
            continue
        assert step.encode or step.decode
        assert all(sequence.arrival_s <= now and tokens > 0 for sequence, tokens in step.encode)
        for sequence, tokens in (*step.encode, *((s, 1) for s in step.decode if not s.finished)):
            assert len(sequence.blocks) * block_size >= sequence.cached + tokens, "every token has a slot"
        steps.append(step)
        finished += ledger.advance(step)
        ledger.check()
        now += 1.0
        assert len(steps) < 100_000
    assert ledger.iterations == sum(bool(step.decode) for step in steps)
    return steps, sequences, finished


@settings(max_examples=150, deadline=None)
@given(POLICIES, REQUESTS)
def test_every_request_finishes_once_with_all_its_tokens_and_no_block_stays_behind(policy, requests):
    _, sequences, finished = drive(policy, requests)
    assert sorted(s.index for s in finished) == list(range(len(requests)))
    for sequence, (prompt, output, _) in zip(sequences, requests, strict=True):
        assert sequence.generated == output
        assert sequence.cached == prompt + output - 1
        assert not sequence.blocks


@settings(max_examples=60, deadline=None)
@given(POLICIES, REQUESTS)
def test_an_encoder_decoder_makes_every_token_by_decoding(policy, requests):
    steps, sequences, finished = drive(policy, requests, encoder_decoder=True)
    assert sorted(s.index for s in finished) == list(range(len(requests)))
    assert [s.generated for s in sequences] == [output for _, output, _ in requests]
    if not isinstance(policy, StaticPolicy):
        assert sum(len(step.decode) for step in steps) == sum(output for _, output, _ in requests)


@settings(max_examples=150, deadline=None)
@given(POLICIES, REQUESTS)
def test_a_step_repeats_as_long_as_it_says(policy, requests):
    """Whoever runs a step as often as it repeats, until somebody finishes or may arrive, comes to the same steps."""
    alike = copy.copy(policy)
    one_by_one = [shape(step) for step in drive(policy, requests)[0]]
    ledger = Ledger(BlockPool(12, 8), fcfs, not isinstance(alike, StaticPolicy))
    ledger.submit([Sequence(i, prompt, output, arrival) for i, (prompt, output, arrival) in enumerate(requests)])
    now, steps = 0.0, []
    while not ledger.idle:
        step = alike.next_step(ledger, now)
        if step is None:
            now = ledger.waiting.next_arrival(now)
            continue
        times = min([step.repeats, *[s.max_output - s.generated for s in step.decode if not s.finished]])
        arrival = ledger.waiting.next_arrival(now)
        if step.arrivals and arrival is not None:
            times = min(times, math.ceil(arrival - now))
        assert times == 1 or not step.encode
        assert not step.arrivals or isinstance(policy, OrcaPolicy | ChunkedPolicy), "others admit at ends alone"
        ledger.advance(step, iterations=times)
        steps += [shape(step)] * times
        now += times
    assert steps == one_by_one


def shape(step):
    return [(s.index, count) for s, count in step.encode], [s.index for s in step.decode]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), REQUESTS)
def test_waa_encodes_and_decodes_whoever_is_ready(batch, requests):
    """Encoding takes two seconds and the transfer one; decoding goes on meanwhile, second by second."""
    policy = WAAPolicy(batch)
    ledger = Ledger(BlockPool(12, 8), fcfs, disaggregated=True)
    sequences = [Sequence(i, prompt, output, arrival) for i, (prompt, output, arrival) in enumerate(requests)]
    ledger.submit(sequences)
    now = 0
    while not ledger.idle:
        step = policy.next_encode(ledger, now) if now % 2 == 0 else None
        if step:
            assert not step.decode and len(step.encode) <= batch
            assert all(s.arrival_s <= now and count == s.input_tokens for s, count in step.encode)
            for s, _ in step.encode:
                s.kv_arrived_s = now + 3.0
            ledger.advance(step)
        step = policy.next_decode(ledger, now)
        if step:
            assert not step.encode and all(s.kv_arrived_s <= now for s in step.decode)
            ledger.advance(step)
        ledger.check()
        now += 1
        assert now < 100_000
    assert [s.generated for s in sequences] == [output for _, output, _ in requests]
    assert ledger.pool.available == ledger.pool.total


@pytest.mark.parametrize("engine", ["vllm", "vllm-0.11", "sglang", "tensorrt-llm"])
def test_other_engines_run_chunked_prefill_alone(engine):
    assert [policy for policy in TRAITS if runs(engine, policy)] == ["chunked"]


@pytest.mark.parametrize("engine", ["exegpt", "paper", "none"])
def test_our_engine_runs_every_policy_and_presets_of_no_engine_stand_for_all(engine):
    assert all(runs(engine, policy) for policy in TRAITS)


def test_every_engine_that_a_policy_names_is_a_preset():
    assert {engine for traits in TRAITS.values() for engine in traits.engines} <= set(ENGINES)


@pytest.mark.parametrize("policy", ["static", "hybrid", "orca", "chunked", "rra"])
def test_a_policy_is_what_its_traits_say(policy):
    traits = TRAITS[policy]
    steps, _, _ = drive(make_policy(schedule(policy)), [(40, 3 + i % 7, 0.0) for i in range(12)], blocks=200)
    assert traits.mixed == any(step.encode and step.decode for step in steps)
    assert traits.splits_prompts == any(count < 40 for step in steps for _, count in step.encode)


def test_variables_are_known_by_what_they_set():
    control = schedule("rra").control
    found = {kind: control.of_kind(kind) for kind in ("prompts", "target", "period", "tokens")}
    assert found == {"prompts": 4, "target": 9, "period": 8, "tokens": None}


@pytest.mark.parametrize("wrong", [None, 0, -1, MAX_TOKENS + 1])
@pytest.mark.parametrize(
    ("policy", "name"),
    [
        (traits.name, name)
        for traits in TRAITS.values()
        for name, kind in kinds(traits.control).items()
        if kind not in (None, "encode-micro-batches")
    ],
)
def test_a_control_variable_that_the_policy_needs_is_checked(policy, name, wrong):
    with pytest.raises(InputError, match=f"variable {name} can't be {wrong}: it must be from 1 to 10,000,000"):
        changed(schedule(policy), **{name: wrong})


def test_a_policy_does_no_more_than_it_declares(monkeypatch):
    @dataclass(frozen=True, kw_only=True)
    class BareControl(Control):
        def make(self, context):
            return StaticPolicy(1)

    bare = Traits(name="bare", what="one at a time", control=BareControl)
    monkeypatch.setitem(TRAITS, "bare", bare)
    with pytest.raises(InputError, match="bare can't use admission 'grow'"):
        make_ledger(schedule("bare", admission="grow"), fcfs)
    with pytest.raises(InputError, match="bare can't cache prefixes"):
        make_ledger(schedule("bare", prefix_caching=True), fcfs)
    assert make_ledger(schedule("bare"), fcfs).early_termination
    assert not (bare.disaggregated or bare.mixed or bare.splits_prompts or bare.adjustable or bare.searched)


def test_an_encoder_takes_no_chunks():
    with pytest.raises(InputError, match="'t5-small', because its encoder reads a whole prompt"):
        make_policy(schedule("chunked", builtin_model("t5-small")))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 30), REQUESTS)
def test_chunked_never_exceeds_its_token_budget_or_its_sequences(most, budget, requests):
    steps, _, _ = drive(ChunkedPolicy(most, budget), requests)
    assert all(step.tokens <= budget for step in steps)
    assert all(len(step.encode) + len(step.decode) <= most for step in steps)


@pytest.mark.parametrize(("residents", "tokens", "joins"), [(4, 2, False), (4, 3, True), (2, 3, False)])
def test_chunked_says_whether_a_prompt_could_join_its_decoding_iterations(residents, tokens, joins):
    steps, _, _ = drive(ChunkedPolicy(residents, tokens), [(1, 6, 0.0), (1, 6, 0.0)])
    (both,) = {step.arrivals for step in steps if not step.encode and len(step.decode) == 2}
    assert both == joins


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 10), REQUESTS)
def test_rra_encodes_at_most_its_batch_and_decodes_at_most_its_iterations_in_between(batch, iterations, requests):
    steps, _, _ = drive(RRAPolicy(batch, iterations), requests)
    run = 0
    for step in steps:
        assert not (step.encode and step.decode)
        assert len(step.encode) <= batch
        run = 0 if step.encode else run + 1
        # a phase that found nothing to admit decodes on: only a full cache or an empty queue makes that happen
        assert run <= iterations or not step.encode


def test_rra_alternates_exactly_while_requests_wait():
    steps, _, _ = drive(RRAPolicy(2, 3), [(4, 10, 0.0)] * 8, blocks=100)
    assert "".join("E" if step.encode else "d" for step in steps)[:12] == "EdddEdddEddd"


def test_static_computes_finished_rows_until_the_longest_ends():
    steps, _, _ = drive(StaticPolicy(2), [(4, 2, 0.0), (4, 6, 0.0), (4, 3, 0.0)])
    assert [len(step.decode) for step in steps] == [0, 2, 2, 2, 2, 2, 0, 1, 1]


def test_orca_encodes_no_more_prompts_in_a_step_than_asked():
    steps, _, _ = drive(OrcaPolicy(8, 1), [(4, 5, 0.0)] * 6, blocks=100)
    assert max(len(step.encode) for step in steps) == 1
    assert steps[1].phase == "mixed"


def test_a_request_larger_than_the_cache_is_refused_with_its_size():
    ledger = Ledger(BlockPool(4, 8), fcfs)
    with pytest.raises(InputError, match=r"Request 0 needs 6 KV blocks for 20 \+ 25 tokens, but the cache has 4"):
        ledger.submit([Sequence(0, 20, 25)])


def test_an_encoder_decoder_caches_its_start_token_too():
    pools = [BlockPool(8, 8), BlockPool(8, 8)]
    for pool, encoder_decoder in zip(pools, (False, True), strict=True):
        ledger = Ledger(pool, fcfs, encoder_decoder=encoder_decoder)
        ledger.submit([Sequence(0, 8, 9)])
        ledger.admit(1, 0.0)
    assert [pool.available for pool in pools] == [6, 5]


def test_a_full_cache_makes_requests_wait_in_order():
    ledger = Ledger(BlockPool(4, 8), fcfs)
    ledger.submit([Sequence(0, 20, 5), Sequence(1, 20, 5), Sequence(2, 1, 1)])
    assert [s.index for s in ledger.admit(8, 0.0)] == [0]  # the small one doesn't overtake the one that must wait


def test_cancelling_frees_blocks_at_once():
    ledger = Ledger(BlockPool(4, 8), fcfs)
    waiting, resident = Sequence(0, 4, 1), Sequence(1, 4, 1)
    ledger.submit([resident])
    ledger.admit(1, 0.0)
    ledger.submit([waiting])
    ledger.cancel(resident)
    ledger.cancel(waiting)
    assert ledger.idle
    assert ledger.pool.available == 4


def test_a_pool_allocates_each_block_once_and_frees_no_more():
    pool = BlockPool(3, 16)
    blocks = pool.allocate(3)
    assert sorted(blocks) == [0, 1, 2]
    with pytest.raises(MemoryError):
        pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(ValueError, match="were freed"):
        pool.free([0])


def test_a_stop_token_ends_a_sequence_early():
    ledger = Ledger(BlockPool(4, 8), fcfs)
    sequence = Sequence(0, 4, 10)
    ledger.submit([sequence])
    ledger.admit(1, 0.0)
    ledger.advance(Step(encode=((sequence, 4),)))
    assert ledger.advance(Step(decode=(sequence,))) == []
    ledger.stop(sequence)
    assert sequence.generated == 2
    assert ledger.idle and ledger.pool.available == 4
    ledger.stop(sequence)  # of an earlier token, where its length has ended it meanwhile
    assert ledger.pool.available == 4


def test_a_static_batch_ends_with_the_stop_token_of_its_last_sequence():
    ledger = Ledger(BlockPool(4, 8), fcfs, early_termination=False)
    pair = [Sequence(0, 4, 2), Sequence(1, 4, 10)]
    ledger.submit(pair)
    ledger.admit(2, 0.0)
    ledger.advance(Step(encode=tuple((s, 4) for s in pair)))
    assert ledger.advance(Step(decode=tuple(pair))) == [pair[0]]
    assert ledger.residents == 2
    ledger.stop(pair[1])
    assert ledger.idle and ledger.pool.available == 4


@pytest.mark.parametrize("name", ["micro_batches", "encode_micro_batches"])
@pytest.mark.parametrize("wrong", [0, -1, MAX_TOKENS + 1])
def test_numbers_of_micro_batches_are_checked_under_every_policy(name, wrong):
    """Of -1 none would be computed, and of 0 at a prefill none either."""
    for policy in TRAITS:
        with pytest.raises(InputError, match=f"variable {name} can't be {wrong}: it must be from 1 to 10,000,000"):
            changed(schedule(policy), **{name: wrong})
        assert getattr(changed(schedule(policy), **{name: 1}).control, name) == 1
