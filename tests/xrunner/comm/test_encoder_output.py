"""The encoder's output on its way: who takes it from whom, and in which order it is taken."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.xrunner.cells import WAA, schedule, stages
from xcore.specs.model import ModelSpec
from xcore.specs.schedule import ranks_needed
from xrunner.comm.encoder_output import EncodedReceiving, slots_in
from xrunner.comm.kv_transfer import KVArrival
from xrunner.comm.place import Place
from xrunner.models.device import CPU

SPEC = ModelSpec("m", "t5", 7, 64, 8, 8, 8, 96, True, 300, 96, 7)
DEGREES = st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=4).map(tuple)


@given(DEGREES, DEGREES, st.integers(1, 2), st.booleans())
def test_every_rank_that_decodes_has_one_source(encode, decode, replicas, disaggregated):
    layers = stages(encode, SPEC)
    if disaggregated:
        layers = stages(encode, SPEC, "encode") + stages(decode, SPEC, "decode", sum(encode))
    plan = schedule(SPEC, "waa-c" if disaggregated else "rra", stages=layers, replicas=replicas, **WAA)
    places = [Place(plan, rank) for rank in range(ranks_needed(plan))]
    ending = next(place.stage for place in reversed(places) if place.encoder_layers.stop == SPEC.encoder_layers)
    for place in places:
        assert all(places[rank].encoded_by == place.rank for rank in place.encodes_for)
        if place.stage == ending or not place.layers:
            assert place.encoded_by is None
        else:
            source = places[place.encoded_by]
            assert place.rank in source.encodes_for
            assert (source.stage, source.replica, source.part) == (ending, place.replica, place.part % source.tp)


class Post:
    """A transport on which what is waited for comes, and nothing else unless it is let through."""

    def __init__(self):
        self.expected, self.there = [], 0

    def expect(self, tensor, source, tag):
        self.expected.append(tensor.fill_(len(self.expected)))
        return len(self.expected)

    def arrived(self, pending):
        return pending <= self.there

    def wait(self, there):
        while not there():
            self.there += 1


@pytest.fixture
def receiving():
    """The receiving side, its transport, and what was taken over: (number of the output, slots)."""
    post, taken = Post(), []
    model = SimpleNamespace(
        spec=SPEC,
        dtype="fp32",
        device=CPU,
        cache_encoded=lambda x, slots, cache: taken.append((int(x[0, 0]), slots.tolist())),
    )
    place = SimpleNamespace(encoded_by=3, schedule=SimpleNamespace(block_size=4))
    return EncodedReceiving(model, None, place, post), post, taken


def blocks(*numbers):
    return np.array(numbers, dtype=np.int32)


def test_a_piece_waits_for_what_it_decodes_with_alone(receiving):
    ours, post, taken = receiving
    for number, held in enumerate(([2], [0, 5], [7])):
        ours.expect(KVArrival(number, slots_in(held, 4 * len(held) - 1, 4)))
    assert ours.wait_for(blocks(1, 3)) == 0 and post.there == 0
    assert ours.wait_for(blocks(1, 0)) == 2 and post.there == 2 and not taken
    ours.store(2)
    assert taken == [(0, [8, 9, 10]), (1, [0, 1, 2, 3, 20, 21, 22])]
    assert ours.wait_for(blocks(0, 2)) == 0
    ours.drain()
    assert taken[2:] == [(2, [28, 29, 30])] and post.there == 3
    ours.drain()
    assert len(taken) == 3


def test_blocks_of_a_cancelled_sequence_end_up_with_their_next_holders(receiving):
    """Block 2 has had one holder whose output was never received, then another."""
    ours, _, taken = receiving
    ours.expect(KVArrival(0, slots_in([2], 4, 4)))
    ours.expect(KVArrival(1, slots_in([2], 3, 4)))
    ours.store(ours.wait_for(blocks(2)))
    assert taken == [(0, [8, 9, 10, 11]), (1, [8, 9, 10])]


def test_what_comes_is_taken_in_the_order_in_which_it_was_announced(receiving):
    ours, post, taken = receiving
    for number in range(3):
        ours.expect(KVArrival(number, slots_in([number], 1, 4)))
    assert ours.arrived() == []
    post.there = 2
    assert ours.arrived() == [0, 1] and ours.arrived() == []
    assert [number for number, _ in taken] == [0, 1]
