"""What is kept from one decoding iteration to the next is what would be made anew."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.xrunner.cells import requests
from xcore.batching import MicroBatch, Sequence
from xcore.requests.request import Request
from xrunner.rank.assembly import Assembler
from xrunner.rank.running import RunningRequest


def assert_same(mine, theirs):
    (batch, receivers), (other, others) = mine, theirs
    assert receivers == others and (batch.phase, batch.computed, batch.new_tokens) == (
        other.phase,
        other.computed,
        other.new_tokens,
    )
    for a, b in zip(batch.arrays, other.arrays, strict=True):
        assert a.dtype == b.dtype and np.array_equal(a, b)


@given(st.data(), st.sampled_from([(), (7,)]))
def test_batches_that_change_at_any_moment(data, start):
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 40), st.integers(2, 9)), min_size=2, max_size=9))
    running = {}
    for index, request in enumerate(requests(lengths)):
        sequence = Sequence(index, len(request.prompt_ids), request.max_tokens)
        sequence.blocks = list(range(9 * index, 9 * index + 4))
        running[index] = RunningRequest(request, sequence, np.array(request.prompt_ids), start=start)
    assemble, waiting, resident = Assembler(running, 16), list(running.values()), []
    while waiting or resident:
        joins = [run.sequence for run in waiting[: data.draw(st.integers(0 if resident else 1, 2))]]
        micro_batches = [[run.sequence for run in resident if run.sequence.index % 2 == m] for m in range(2)]
        for m, decoded in enumerate(micro_batches):
            encoded = [(sequence, sequence.input_tokens) for sequence in joins if sequence.index % 2 == m]
            if encoded or decoded:
                micro_batch = MicroBatch(m, encoded, decoded)
                assert_same(assemble(micro_batch), Assembler(running, 16)(micro_batch))
        for run in resident:
            run.sequence.cached += 1
        for sequence in joins:
            sequence.cached = sequence.input_tokens
        waiting = waiting[len(joins) :]
        for run in (*resident, *([] if start else [running[sequence.index] for sequence in joins])):
            run.output.append(len(run.output))
        resident += [running[sequence.index] for sequence in joins]
        resident = [run for run in resident if len(run.output) < run.request.max_tokens]


def decoding(start, cached, output, behind=0):
    """A request of ten prompt tokens (100 and following) that is decoded, and how it is assembled."""
    request = Request("0", tuple(range(100, 110)), 60)
    sequence = Sequence(0, 10, 60)
    sequence.cached, sequence.generated, sequence.recomputed, sequence.behind = cached, len(output), behind, behind
    sequence.blocks = [7, 3, 5]
    running = RunningRequest(request, sequence, np.array(request.prompt_ids), list(output), start=start)
    return sequence, Assembler({0: running}, 16)


def test_an_encoder_decoders_output_is_computed_again_in_one_pass():
    """Its start token and all that it had made, after its input in the cache."""
    sequence, assemble = decoding((1,), 10, (50, 51, 52), behind=3)
    batch, receivers = assemble(MicroBatch(0, (), (sequence,)))
    assert batch.tokens.tolist() == [1, 50, 51, 52] and batch.positions.tolist() == [10, 11, 12, 13]
    assert batch.slots.tolist() == [7 * 16 + n for n in (10, 11, 12, 13)] and batch.rows.tolist() == [3]
    (part,) = batch.attention
    assert (part.begin, part.end) == (0, 4)
    assert [array.tolist() for array in part.arrays] == [[[7, 3, 5]], [0, 4], [14], [10]]
    assert len(receivers) == batch.new_tokens == 1


def test_a_stage_waits_for_outputs_of_an_encoder_into_any_block_of_a_decoding_sequence():
    """Grown blocks may be another's whose encoded input is still on its way: it must not be written over these."""
    sequence, assemble = decoding((1,), 11, (50,))
    batch, _ = assemble(MicroBatch(0, (), (sequence,)))
    assert set(batch.decoding_blocks.ravel().tolist()) == {7, 3, 5}
    sequence, assemble = decoding((1,), 0, ())
    batch, _ = assemble(MicroBatch(0, [(sequence, 10)], ()))
    assert batch.decoding_blocks.size == 0 and batch.prompts == 10


def test_tokens_that_were_sampled_last_are_taken_on_the_device():
    sequence, assemble = decoding((), 12, (50, 51))
    batch, _ = assemble(MicroBatch(0, (), (sequence,)), {0: 4})
    rows, places = batch.fed
    assert batch.tokens.tolist() == [0] and batch.positions.tolist() == [12]
    assert (rows.tolist(), places.tolist()) == ([0], [4])
