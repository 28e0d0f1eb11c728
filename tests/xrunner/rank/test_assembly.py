"""What is kept from one decoding iteration to the next is what would be made anew."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from exegpt.batching import MicroBatch, Sequence
from tests.xrunner.cells import requests
from xrunner.rank.assembly import Assembler, Running


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
        running[index] = Running(request, sequence, np.array(request.prompt_ids), start=start)
    assemble, waiting, resident = Assembler(running, 16), list(running.values()), []
    while waiting or resident:
        joins = [one.sequence for one in waiting[: data.draw(st.integers(0 if resident else 1, 2))]]
        micro_batches = [[one.sequence for one in resident if one.sequence.index % 2 == m] for m in range(2)]
        for m, decoded in enumerate(micro_batches):
            encoded = [(sequence, sequence.input_tokens) for sequence in joins if sequence.index % 2 == m]
            if encoded or decoded:
                micro_batch = MicroBatch(m, encoded, decoded)
                assert_same(assemble(micro_batch), Assembler(running, 16)(micro_batch))
        for one in resident:
            one.sequence.cached += 1
        for sequence in joins:
            sequence.cached = sequence.input_tokens
        waiting = waiting[len(joins) :]
        for one in (*resident, *([] if start else [running[sequence.index] for sequence in joins])):
            one.output.append(len(one.output))
        resident += [running[sequence.index] for sequence in joins]
        resident = [one for one in resident if len(one.output) < one.request.max_tokens]
