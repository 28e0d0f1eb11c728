"""A step is split into micro-batches without losing, repeating or moving a sequence."""

from hypothesis import given
from hypothesis import strategies as st

from xcore.batching import MicroBatching, Sequence, Step

COUNTS = st.integers(1, 5)


@st.composite
def steps(draw, decodes):
    """Prompts with the tokens to compute of each, and sequences that decode; those that were preempted are behind."""
    indices = draw(st.lists(st.integers(0, 30), unique=True, min_size=1, max_size=12))
    encoding = draw(st.integers(0, len(indices))) if decodes else len(indices)
    sequences = [Sequence(i, 40, 9) for i in indices]
    for sequence in sequences[encoding:]:
        sequence.behind = draw(st.integers(0, 4))
    encode = tuple((sequence, draw(st.integers(1, 40))) for sequence in sequences[:encoding])
    return Step(encode, tuple(sequences[encoding:]))


@given(steps(decodes=True), COUNTS, st.integers(1, 3))
def test_a_sequence_is_always_in_the_micro_batch_of_its_turn(step, count, replicas):
    batching = MicroBatching(count, replicas=replicas)
    found = batching.split(step)
    assert [m.index for m in found] == sorted({batching.index(s) for s in (*(s for s, _ in step.encode), *step.decode)})
    for micro_batch in found:
        assert list(micro_batch.encode) == [
            pair for pair in step.encode if batching.index(pair[0]) == micro_batch.index
        ]
        assert list(micro_batch.decode) == [s for s in step.decode if batching.index(s) == micro_batch.index]
        assert 0 <= micro_batch.index < count
    assert sum(m.tokens for m in found) == step.tokens
    assert step.tokens == sum(n for _, n in step.encode) + sum(1 + s.behind for s in step.decode)
    assert sum(m.sequences for m in found) == len(step.encode) + len(step.decode)


@given(steps(decodes=False), COUNTS, COUNTS)
def test_prompts_alone_are_cut_evenly_in_the_order_of_their_turns(step, count, encode_count):
    batching = MicroBatching(count, encode_count)
    found = batching.split(step)
    sizes = [m.sequences for m in found]
    assert [m.index for m in found] == list(range(min(encode_count, len(step.encode))))
    assert max(sizes) - min(sizes) <= 1
    pairs = [pair for m in found for pair in m.encode]
    assert sorted(pairs, key=step.encode.index) == list(step.encode)
    turns = [batching.index(s) for s, _ in pairs]
    assert turns == sorted(turns)
    assert {m.phase for m in found} == {"encode"}


def test_replicas_deal_requests_to_their_micro_batches_in_turn():
    batching = MicroBatching(3, replicas=2)
    assert [batching.index(Sequence(i, 1, 1)) for i in range(8)] == [0, 0, 1, 1, 2, 2, 0, 0]


def test_a_step_gives_tokens_where_a_prompt_is_complete_or_a_sequence_decodes():
    prompt, running = Sequence(0, 5, 4), Sequence(1, 5, 4)
    part, rest, decode = Step(encode=((prompt, 2),)), Step(encode=((prompt, 5),)), Step(decode=(running,))
    assert [step.gives_tokens(False) for step in (part, rest, decode)] == [False, True, True]
    assert [step.gives_tokens(True) for step in (part, rest, decode)] == [False, False, True]
