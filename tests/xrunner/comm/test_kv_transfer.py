"""Places and routes: every rank's neighbours agree with each other, and every key and value finds its way."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.xrunner.cells import disaggregated, schedule
from xcore.specs.model import ModelSpec
from xcore.specs.schedule import ranks_needed
from xrunner.comm.kv_transfer import KVReceiving, KVSending, buffer_bytes, held_heads, routes
from xrunner.comm.place import Place
from xrunner.models import KVCache, Shard

SPEC = ModelSpec("m", "llama", 7, 64, 8, 4, 8, 96, True, 300, 96)
DEGREES = st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=4).map(tuple)


def places(plan):
    return [Place(plan, rank) for rank in range(ranks_needed(plan))]


@given(DEGREES, st.integers(1, 3))
def test_neighbours_agree(degrees, replicas):
    all_places = places(schedule(SPEC, "rra", degrees, replicas=replicas))
    for place in all_places:
        assert all(all_places[rank].before == place.rank for rank in place.after)
        if place.before is not None:
            assert place.rank in all_places[place.before].after
            assert place.part % all_places[place.before].tp == all_places[place.before].part
            assert all_places[place.before].layers.stop == place.layers.start
        assert place.first == (place.before is None) == (place.layers.start == 0)
        assert all_places[place.driver].first and all_places[place.sampler].samples
        assert all_places[place.driver].replica == all_places[place.sampler].replica == place.replica
        assert {place.driver, *place.followers} == {p.rank for p in all_places if p.replica == place.replica}
    assert sum(place.samples for place in all_places) == replicas


@pytest.mark.parametrize(("kv_heads", "tp"), list(itertools.product((1, 2, 4, 8), (1, 2, 4, 8))))
def test_the_heads_of_a_shard_are_those_of_its_weights(kv_heads, tp):
    from dataclasses import replace

    spec = replace(SPEC, kv_heads=kv_heads)
    rows = torch.arange(kv_heads * spec.head_size)[:, None].expand(-1, 3)
    for place in places(schedule(spec, "rra", (tp,))):
        shard = Shard(place.part, tp, lambda x: x)
        heads = shard.cut(rows, (shard.share(spec).kv_heads * spec.head_size, 3))[:, 0] // spec.head_size
        assert sorted(set(heads.tolist())) == list(held_heads(place, spec))


class Mail:
    """A transport between ranks of this process."""

    def __init__(self, boxes, rank):
        self.boxes, self.rank = boxes, rank

    def send(self, tensor, to, tag):
        self.boxes.setdefault((self.rank, to), []).append(tensor)

    def expect(self, tensor, source, tag):
        return SimpleNamespace(tensor=tensor, source=source, there=False)

    def arrived(self, pending):
        waiting = self.boxes.get((pending.source, self.rank))
        if not pending.there and waiting:
            sent = waiting.pop(0)
            assert sent.shape == pending.tensor.shape
            pending.tensor.copy_(sent)
            pending.there = True
        return pending.there


def new_cache(place, spec, blocks, dtype):
    return KVCache.allocate(Shard(place.part, place.tp, lambda x: x).share(spec), len(place.layers), blocks, 4, dtype)


def filled(place, spec, blocks, dtype):
    """A cache whose every value encodes its tensor, layer, head, block and place."""
    cache = new_cache(place, spec, blocks, dtype)
    for which, tensors in enumerate((cache.keys, cache.values)):
        for layer, tensor in zip(place.layers, tensors, strict=True):
            tensor.copy_(expected(which, layer, held_heads(place, spec), range(blocks), tensor.shape[2:], dtype))
    return cache


def expected(which, layer, heads, blocks, inner, dtype):
    if dtype == "int8":
        return expected(which, layer, heads, blocks, inner, "fp32").mul(1021).remainder(251).sub(125).to(torch.int8)
    codes = torch.tensor([[which + 10 * layer + 1000 * head + 100_000 * block for head in heads] for block in blocks])
    return (codes[:, :, None, None] + torch.arange(inner.numel()).view(inner) / 1024).float()


@given(DEGREES, DEGREES, st.sampled_from([1, 2, 4, 8]), st.integers(1, 2), st.sampled_from(["fp32", "int8"]))
def test_every_key_and_value_goes_to_every_rank_that_decodes_with_it(encode, decode, kv_heads, replicas, dtype):
    from dataclasses import replace

    spec, boxes = replace(SPEC, kv_heads=kv_heads), {}
    plan = disaggregated(spec, encode, decode, replicas=replicas, block_size=4, kv_dtype=dtype)
    all_places = places(plan)
    ours, theirs = np.array([2, 0, 3]), np.array([5, 1, 4])
    for place in all_places:
        if place.line[0].phase == "encode":
            KVSending(filled(place, spec, 4, dtype), place, spec, Mail(boxes, place.rank)).send(ours)
    for place in all_places:
        if place.line[0].phase == "decode":
            cache = new_cache(place, spec, 6, dtype)
            receiving = KVReceiving(cache, place, spec, Mail(boxes, place.rank))
            receiving.expect(SimpleNamespace(number=7, places=theirs))
            assert receiving.arrived() == [7] and receiving.arrived() == []
            for which, tensors in enumerate((cache.keys, cache.values)):
                for layer, tensor in zip(place.layers, tensors, strict=True):
                    reference = expected(which, layer, held_heads(place, spec), ours.tolist(), tensor.shape[2:], dtype)
                    assert torch.equal(tensor[torch.from_numpy(theirs)], reference)
                    assert not tensor[[0, 2, 3]].any()
            held = 2 * len(place.layers) * len(held_heads(place, spec)) * 4
            held *= spec.head_size + 4 if dtype == "int8" else spec.head_size * 4
            assert buffer_bytes(place, spec, 3) == 3 * held
    assert not any(boxes.values())
    for replica in range(replicas):
        pairs = [(route.source, route.target) for route in routes(plan, replica, spec)]
        assert len(set(pairs)) == len(pairs)  # of one pair batches arrive in order
