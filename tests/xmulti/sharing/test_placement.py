"""MuxServe's placement: every cut of the nodes, and the greedy assignment beside all assignments."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from xmulti.sharing import fluid_bound, placement
from xmulti.sharing.placement import MOST_SEQS, MOST_SHARES, Mesh, Placer, Popular, cuts, mesh_groups


class Cost:
    """Twice the devices take six tenths of the time."""

    def __init__(self, size, devices):
        self.scale = size * 0.6 ** np.log2(devices)

    def prefill_seconds(self, tokens, share):
        return self.scale * 1e-4 * sum(tokens) / share

    def decode_seconds(self, sequences, contexts, share):
        seconds = self.scale * (0.01 + 1e-4 * sequences + 1e-8 * sequences * contexts)
        return seconds * max(1.0, 0.4 / share)


def model(name, rate, size, weights=10.0):
    return Popular(name, rate, 100, 200, rate * size, lambda n: Cost(size, n), weights * size, 0.001 * size, 1000)


MODELS = [model("a", 6.0, 1.0), model("b", 1.0, 2.0), model("c", 0.5, 1.0), model("d", 0.2, 4.0)]


def place(models=MODELS, nodes=1, per_node=4, memory=40.0):
    placer = Placer(memory, 1.0)
    return placer, placer.place(models, nodes, per_node, lambda done, of: None)


def test_cuts_of_a_node():
    assert cuts(4) == [(4,), (2, 2), (2, 1, 1), (1, 1, 1, 1)]
    assert len(cuts(8)) == 10 and all(sum(cut) == 8 for cut in cuts(8))
    assert cuts(3) == [(2, 1), (1, 1, 1)]
    assert len(list(mesh_groups(4, 8))) == 715  # ten cuts over four nodes that are alike


def test_every_model_is_placed_once_and_fits():
    placer, placement = place()
    names = sorted(o.popular.name for mesh in placement.meshes for o in mesh.occupants)
    assert names == ["a", "b", "c", "d"]
    devices = [device for mesh in placement.meshes for device in mesh.devices]
    assert sorted(devices) == list(range(4))
    for mesh in placement.meshes:
        assert placer.kv_bytes(mesh) > 0
        assert sum(o.decode_share for o in mesh.occupants) <= MOST_SHARES + 1e-9
    assert placement.throughput_seq_s == pytest.approx(sum(sum(placer.throughputs(m)) for m in placement.meshes))


def test_no_model_counts_beyond_its_rate_and_all_rates_are_reached_where_there_is_room():
    placer, placement = place()
    for mesh in placement.meshes:
        rates = [o.popular.rate_seq_s for o in sorted(mesh.occupants, key=lambda o: o.popular.name)]
        assert all(t <= rate + 1e-9 for t, rate in zip(placer.throughputs(mesh), rates, strict=True))
    assert placement.throughput_seq_s == pytest.approx(sum(m.rate_seq_s for m in MODELS), rel=0.1)


@pytest.mark.parametrize("seed", range(6))
def test_greedy_is_near_the_best_of_all_assignments(seed):
    draws = np.random.default_rng(seed)
    models = [model(name, float(draws.uniform(0.2, 12)), float(draws.choice([1, 2, 4]))) for name in "abc"]
    placer, placement = place(models, memory=60.0)
    best = 0.0
    for sizes in mesh_groups(1, 4):
        firsts = [0, *itertools.accumulate(sizes)]
        for where in itertools.product(range(len(sizes)), repeat=3):
            meshes = [Mesh(tuple(range(first, first + size))) for first, size in zip(firsts, sizes, strict=False)]
            for popular, place_of in zip(models, where, strict=True):
                meshes[place_of] = meshes[place_of] and placer._join(meshes[place_of], popular)
            if all(meshes):
                best = max(best, sum(sum(placer.throughputs(mesh)) for mesh in meshes))
    assert 0.9 * best <= placement.throughput_seq_s <= best + 1e-9


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 3), (1, 7), (4, 2)])
def test_fewer_models_than_any_cut_has_meshes_are_placed(nodes, per_node):
    _, placement = place(MODELS[:1], nodes, per_node)
    assert [o.popular.name for mesh in placement.meshes for o in mesh.occupants] == ["a"]
    fewest = min(map(len, mesh_groups(nodes, per_node)))
    assert len(placement.meshes) == fewest > 1, "those of the cuts into larger meshes, of which some stay empty"


def test_models_that_dont_fit_have_no_placement():
    assert place([model("huge", 1.0, 100.0)])[1] is None


def test_the_share_is_the_smallest_that_has_the_rate():
    placer, _ = place()
    slow, fast = placer._candidate(model("slow", 0.1, 1.0), 1), placer._candidate(model("fast", 500.0, 1.0), 1)
    assert slow.decode_share == 0.3 and fast.decode_share >= 0.4


def test_memory_for_keys_and_values_is_what_weights_and_all_else_leave():
    placer = Placer(40.0, 1.0)
    mesh = placer.unit(MODELS[:2], (0, 1), MOST_SHARES)
    assert placer.kv_bytes(mesh) == pytest.approx(2 * (40.0 - 1.0 - 1.0) - 10.0 - 20.0)


def test_each_model_joins_the_mesh_on_which_it_was_tried():
    """Devices of its own, the first that are as good, as long as there are some."""
    placer = Placer(60.0, 1.0)
    models = [model(name, 12.0, 1.0) for name in "abc"]
    placement = placer._greedy(models, (1, 1, 1, 1), 4)
    assert [[o.popular.name for o in mesh.occupants] for mesh in placement.meshes] == [["a"], ["b"], ["c"], []]
    assert placement.throughput_seq_s == pytest.approx(sum(sum(placer.throughputs(mesh)) for mesh in placement.meshes))


def test_a_batch_takes_its_prefill_and_its_decoding():
    one = Placer(40.0, 1.0)._candidate(model("a", 0.1, 1.0), 1)
    prefill_s, decode_s = 1e-4 * 100 * 8, 200 * one.cost.decode_seconds(8, 200.0, one.decode_share)
    assert one.prefill_s(8) == pytest.approx(prefill_s)
    assert one.throughput(8) == pytest.approx(8 / (prefill_s + decode_s))
    assert one.throughput(8, 3.0) == pytest.approx(8 / (3.0 + decode_s))


def test_as_many_models_as_devices_may_have_one_each():
    """Where two of them are no faster than one."""
    models = [replace(model(name, 1000.0, 1.0), cost=lambda devices: Cost(1.0, 1)) for name in "ab"]
    _, placement = place(models, per_node=2)
    assert [[o.popular.name for o in mesh.occupants] for mesh in placement.meshes] == [["a"], ["b"]]


def test_a_sequence_has_half_its_output_in_the_cache_on_average():
    """The oracle is the mean over the sequence's tokens of the number of cached tokens at each."""
    popular = model("a", 1.0, 1.0)
    cached = [popular.input + token for token in range(popular.output + 1)]
    assert popular.kv_bytes == pytest.approx(np.mean(cached) * popular.kv_token_bytes)


@pytest.mark.parametrize(("rate", "lacks", "reaches"), [(2.0, 1.81, 1.82), (100.0, 99.49, 99.51)])
def test_a_model_lacks_throughput_below_a_tenth_or_half_a_request_under_its_rate(rate, lacks, reaches):
    occupant = Placer(40.0, 1.0)._candidate(model("a", rate, 1.0), 1)
    assert occupant.lacks(lacks) and not occupant.lacks(reaches)


@pytest.mark.parametrize("batches", [placement._BATCHES, fluid_bound.BATCHES])
def test_costs_are_known_at_batches_up_to_the_most_two_to_each_doubling(batches):
    assert batches[0] == 1 and batches[-1] == MOST_SEQS and list(batches) == sorted(set(batches))
    steps = [later / earlier for earlier, later in itertools.pairwise(batches)]
    assert all(1.3 < step <= 2.0 for step in steps) and all(1.37 < step < 1.46 for step in steps[5:])
