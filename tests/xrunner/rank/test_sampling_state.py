"""The sampling state beside the tokens that each sequence has, while sequences come, go and take others' slots."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.xrunner import cells
from tests.xrunner.cells import requests
from tests.xrunner.stand_in import StandIn
from xcore.batching import MicroBatch, Sequence
from xrunner.comm.packing import send
from xrunner.core.engine import Engine
from xrunner.models import load_model
from xrunner.rank.assembly import Assembler
from xrunner.rank.running import RunningRequest
from xrunner.rank.sampling_state import SamplingState, Slots

VOCAB = 300
HOW = {"temperature": 0.8, "repetition_penalty": 1.3}


def a_sequence(index, prompt, slots, penalty=1.3, **how):
    """One whose prompt has been computed but for its last token, with 90 blocks of its own."""
    (request,) = requests([(prompt, 90)], temperature=0.8, repetition_penalty=penalty, seed=index)
    request = replace(request, **how)
    sequence = Sequence(index, prompt, 90, 0.0)
    sequence.blocks = list(range(8 * index, 8 * index + 8))
    slot = slots.allocate() if penalty != 1 or request.counted else None
    return RunningRequest(request, sequence, np.array(request.prompt_ids, dtype=np.int64), slot=slot)


def sampled(batch, state, gpu=None):
    return state.sampling(batch.sampling, batch.edits, send([*batch.sampling, *(batch.edits or ())], gpu))


def assert_entered(how, receivers):
    for row, receiver in enumerate(receivers):
        if receiver.slot is not None:
            seen = how.seen[how.slot[row]].nonzero()[:, 0].tolist()
            assert seen == sorted({*receiver.prompt.tolist(), *receiver.output})


@pytest.mark.parametrize("gpu", [None, StandIn()])
@given(st.lists(st.tuples(st.integers(1, 20), st.booleans(), st.integers(1, 6)), min_size=1, max_size=12))
def test_the_state_is_what_sequences_have(gpu, plan):
    """One sequence after the other begins; each ends after a few tokens, and its slot goes to the next."""
    slots, state, running, chance = Slots(), SamplingState(VOCAB, torch.device("cpu")), {}, np.random.default_rng(0)
    assemble = Assembler(running, 16)
    for index, (prompt, penalised, tokens) in enumerate(plan):
        new = a_sequence(index, prompt, slots, 1.3 if penalised else 1.0)
        decode = tuple(request.sequence for request in running.values())
        running[index] = new
        batch, receivers = assemble(MicroBatch(0, ((new.sequence, prompt),), decode))
        how = sampled(batch, state, gpu)
        assert_entered(how, receivers)
        new.sequence.cached = prompt - 1
        new.left = tokens
        for receiver in receivers:
            receiver.output.append(int(chance.integers(VOCAB)))
            receiver.sequence.cached += 1
            receiver.left -= 1
            if not receiver.left:
                if receiver.slot is not None:
                    slots.free(receiver.slot)
                del running[receiver.sequence.index]
    assert len(state.seen) <= 2 * max(1, len(plan))


@pytest.mark.parametrize("ended", [False, True])
def test_tokens_are_counted_that_change_no_logit(ended):
    """Of a penalty that float32 rounds to nothing, and of a sequence that ended while it was computed."""
    slots, state = Slots(), SamplingState(VOCAB, torch.device("cpu"))
    biased = a_sequence(0, 4, slots, 1.0, logit_bias=((7, 1.0),))
    counted = [a_sequence(i, 4, slots, 1.0, frequency_penalty=0.5 if ended else 1e-60) for i in (1, 2, 3)]
    for each in counted:
        each.ended, each.output = ended, [5, 5]
    running = {each.sequence.index: each for each in (biased, *counted)}
    batch, _ = Assembler(running, 16)(MicroBatch(0, tuple((each.sequence, 4) for each in running.values()), ()))
    counts = sampled(batch, state).edits.counts
    assert counts.sum(1)[:3].tolist() == [2, 2, 2] and counts[:3, 5].tolist() == [2, 2, 2]


def test_only_new_tokens_are_sent():
    slots, running = Slots(), {}
    for index in range(3):
        running[index] = a_sequence(index, 20, slots)
    sequences = tuple(request.sequence for request in running.values())
    assemble = Assembler(running, 16)
    first, _ = assemble(MicroBatch(0, tuple((sequence, 20) for sequence in sequences), ()))
    assert first.sampling[-2].tolist() == [0, 1, 2] and first.sampling[-1].shape == (2, 60)
    for request in running.values():
        request.output.append(5)
        request.sequence.cached = 20
    second, _ = assemble(MicroBatch(0, (), sequences))
    assert second.sampling[-2].tolist() == [] and second.sampling[-1].tolist() == [[0, 1, 2], [5, 5, 5]]


def test_a_sequence_without_a_slot_is_no_mistake_once_it_has_ended():
    slots, running = Slots(), {}
    running[0] = a_sequence(0, 4, slots)
    running[0].slot = None
    micro_batch = MicroBatch(0, ((running[0].sequence, 4),), ())
    with pytest.raises(AssertionError, match="has a slot"):
        Assembler(running, 16)(micro_batch)
    running[0].ended = True
    batch, _ = Assembler(running, 16)(micro_batch)
    assert batch.sampling[-1].shape == (2, 0)


def test_slots_are_used_again():
    slots = Slots()
    assert [slots.allocate() for _ in range(3)] == [0, 1, 2]
    slots.free(1)
    assert [slots.allocate(), slots.allocate()] == [1, 3]


def test_a_run_uses_no_more_slots_than_run_at_once(directories):
    """Stop tokens and all: requests one after the other share a slot, and get what they get alone."""
    model = load_model(directories["llama"])
    todo = [replace(request, **HOW, id=str(i)) for i, request in enumerate(requests([(5, 6), (9, 4), (3, 12), (7, 5)]))]
    engine = Engine(model, cells.schedule(model.spec, "orca", max_num_seqs=1))
    together = {result.id: result.output_ids for result in engine.run(todo).results}
    assert len(engine.worker.compute.state.seen) == 1
    for request in todo:
        (alone,) = Engine(model, cells.schedule(model.spec)).run([request]).results
        assert alone.output_ids == together[request.id]
