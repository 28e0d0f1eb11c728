"""Layers to devices: contiguous, complete, balanced, and groups within a node."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.xcore import small_specs
from xcore.errors import InputError
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import ClusterSpec, parse_cluster
from xcore.specs.workload import task
from xscheduler.allocation import (
    LayerSpeed,
    both_stages,
    layer_speeds,
    minimax_split,
    most_replicas,
    most_stages,
    partial_layouts,
    replica_sizes,
    side_stages,
    tp_degrees,
    uniform_layouts,
    uniform_stages,
)
from xsimulator.steady.residents import length_biased_context

A40 = parse_cluster("1xA40")
MODELS = ["gpt2", "t5-3b", "opt-13b", "llama-3.1-8b", "gpt3-175b"]
NODES = [(6, 8), (2, 4), (3, 6), (1, 3), (1, 8), (2, 1)]
DEGREES = (1, 2, 3, 4, 6, 8)
SPEEDS = {tp: LayerSpeed(1.0 / tp + 0.1, 3.0 / tp + 0.2, 0.3 / tp, 0.7 / tp) for tp in DEGREES}
"""Of groups that are quicker than one device, but not by their number."""


def cluster_of(nodes, devices):
    return ClusterSpec("any", nodes, devices, A40.device, A40.intra, A40.inter)


def nodes_of(stage, cluster, offset=0):
    return {(offset + rank) // cluster.devices_per_node for rank in stage.devices}


def firsts(cluster, size):
    """The first device of each replica, from the start of a node on."""
    node = cluster.devices_per_node
    if size > node:
        return range(0, most_replicas(cluster, size) * size, size)
    return [start + i * size for start in range(0, cluster.devices, node) for i in range(node // size)]


def check_layers(ranges, layers):
    """Contiguous, complete, at least one each."""
    assert [a for a, _ in ranges] == [0, *(b for _, b in ranges[:-1])]
    assert ranges[-1][1] == layers
    assert all(b > a for a, b in ranges)


@given(st.sampled_from(["gpt2", "opt-13b", "llama-3.1-8b", "gpt3-175b"]), st.integers(1, 4), st.integers(1, 8))
def test_every_degree_deals_all_layers_evenly(name, nodes, devices):
    model, cluster = builtin_model(name), cluster_of(nodes, devices)
    for tp in tp_degrees(model, cluster):
        stages = uniform_stages(model, cluster, tp)
        cuts = [s.decoder_layers for s in stages]
        check_layers(cuts, model.layers)
        sizes = [b - a for a, b in cuts]
        assert max(sizes) - min(sizes) <= 1
        assert sorted(d for s in stages for d in s.devices) == list(range(cluster.devices))
        assert all(len(nodes_of(s, cluster)) == 1 for s in stages)


def test_a_degree_that_does_not_fit_is_refused():
    with pytest.raises(InputError, match="degree of 3"):
        uniform_stages(builtin_model("gpt2"), parse_cluster("4xA40"), 3)


@given(st.data())
def test_the_slowest_stage_is_as_quick_as_any_split_makes_it(data):
    count = data.draw(st.integers(1, 4))
    layers = data.draw(st.integers(count, 11))
    seconds = st.lists(st.floats(0.01, 5), min_size=count, max_size=count)
    each, other = data.draw(seconds), data.draw(st.lists(st.floats(0, 5), min_size=count, max_size=count))

    def slowest(split):
        return max(n * one + rest for n, one, rest in zip(split, each, other, strict=True))

    found = minimax_split(layers, each, other)
    assert sum(found) == layers
    assert min(found) >= 1
    cuts = itertools.combinations(range(1, layers), count - 1)
    all_splits = ([b - a for a, b in itertools.pairwise((0, *cut, layers))] for cut in cuts)
    assert slowest(found) == pytest.approx(min(map(slowest, all_splits)))


def test_more_stages_than_layers_are_refused():
    with pytest.raises(InputError, match="2 layers can't be split into 3 stages"):
        minimax_split(2, (1.0, 1.0, 1.0), (0.0, 0.0, 0.0))


def test_replicas_are_parts_of_a_node_or_whole_nodes():
    assert replica_sizes(cluster_of(6, 8)) == (1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32, 40, 48)
    assert replica_sizes(cluster_of(1, 5)) == (1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("nodes", "size", "replicas"), [((2, 5), 4, 2), ((2, 5), 2, 4), ((2, 5), 10, 1), ((6, 8), 8, 6), ((5, 4), 8, 2)]
)
def test_devices_that_are_left_over_in_a_node_stay_idle(nodes, size, replicas):
    assert most_replicas(cluster_of(*nodes), size) == replicas


@given(st.integers(1, 5), st.integers(1, 9))
def test_more_nodes_and_more_devices_never_hold_fewer_replicas(nodes, devices):
    cluster = cluster_of(nodes, devices)
    for size in replica_sizes(cluster):
        held = most_replicas(cluster, size)
        assert 1 <= held <= cluster.devices // size
        assert most_replicas(cluster_of(nodes + 1, devices), size) >= held
        if size <= devices:
            assert most_replicas(cluster_of(nodes, devices + 1), size) >= held


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("name", MODELS)
def test_every_replica_of_every_layout_uses_each_device_once_in_groups_within_a_node(name, nodes):
    model, cluster = builtin_model(name), cluster_of(*nodes)
    for size in replica_sizes(cluster):
        layouts = partial_layouts(model, size, cluster.devices_per_node, DEGREES)
        assert set(uniform_layouts(model, size, cluster.devices_per_node, DEGREES)) <= set(layouts)
        assert len(set(layouts)) == len(layouts)
        for layout in layouts:
            stages = both_stages(model, SPEEDS, layout)
            assert tuple(s.tp for s in stages) == layout.degrees
            assert [d for s in stages for d in s.devices] == list(range(size))
            for offset in firsts(cluster, size):
                assert all(len(nodes_of(s, cluster, offset)) == 1 for s in stages)
            check_layers([s.decoder_layers for s in stages], model.layers)
            if model.encoder_layers:
                check_layers([s.encoder_layers for s in stages], model.encoder_layers)


@given(st.sampled_from(MODELS), st.sampled_from(NODES), st.data())
def test_both_of_waas_sides_hold_what_they_need_in_groups_within_a_node(name, nodes, data):
    model, cluster = builtin_model(name), cluster_of(*nodes)
    size = data.draw(st.sampled_from([n for n in replica_sizes(cluster) if n > 1]))
    encoding = data.draw(st.integers(1, size - 1))
    sides = []
    for phase, devices, offset in (("encode", encoding, 0), ("decode", size - encoding, encoding)):
        layouts = partial_layouts(model, devices, cluster.devices_per_node, DEGREES)
        assume(layouts)
        sides.append(side_stages(model, SPEEDS, data.draw(st.sampled_from(layouts)), phase, offset))
    stages = sides[0] + sides[1]
    assert [d for s in stages for d in s.devices] == list(range(size))
    for offset in firsts(cluster, size):
        assert all(len(nodes_of(s, cluster, offset)) == 1 for s in stages)
    encode, decode = sides
    check_layers([s.decoder_layers for s in decode], model.layers)
    assert all(s.encoder_layers is None for s in decode)
    if model.encoder_layers:
        check_layers([s.encoder_layers for s in encode], model.encoder_layers)
        assert all(s.decoder_layers is None for s in encode)
    else:
        check_layers([s.decoder_layers for s in encode], model.layers)


def test_all_multiples_of_a_degree_are_tried_and_nothing_deeper_than_the_model():
    model = builtin_model("opt-13b")
    found = {(one.degree, one.gpus) for one in partial_layouts(model, 8, 8, (1, 2, 4))}
    assert found == {(1, 0), (2, 2), (2, 4), (2, 6), (2, 8), (4, 4), (4, 8)}
    assert {(one.degree, one.gpus) for one in partial_layouts(model, 6, 6, (2, 4))} == {(2, 6)}  # none may stand alone
    shallow = builtin_model("gpt2")
    for one in partial_layouts(shallow, 16, 8, (1, 2, 4, 8)):
        assert len(one.degrees) <= most_stages(shallow) == 12


def test_the_ends_of_a_pipeline_hold_fewer_layers_where_embedding_and_head_take_long():
    model = builtin_model("opt-13b")
    speeds = {1: LayerSpeed(encode=1.0, decode=1.0, embedding=4.0, head=6.0)}
    (layout,) = partial_layouts(model, 4, 4, (1,))
    sizes = [b - a for a, b in (s.decoder_layers for s in both_stages(model, speeds, layout))]
    # 23 would leave room for 9 + 11 + 11 + 8 layers, one less than there are
    assert max(2 * n + end for n, end in zip(sizes, (4, 0, 0, 6), strict=True)) == 24


UNLIKE = {1: LayerSpeed(5.0, 2.0, 3.0, 4.0), 2: LayerSpeed(2.0, 1.5, 1.0, 2.5)}
"""Encoding and decoding, the groups' gain, and the two ends all differ."""


@pytest.mark.parametrize("name", ["gpt2", "t5-3b"])
@pytest.mark.parametrize("phase", ["encode", "decode", "both"])
def test_the_slowest_stage_of_a_phase_is_as_quick_as_any_split_makes_it(name, phase):
    """By the work that the phase does: the embedding and the head belong to decoding alone."""
    model = builtin_model(name)
    model = replace(model, layers=11, encoder_layers=9 if model.encoder_layers else 0)
    for layout in partial_layouts(model, 4, 4, (1, 2)):
        stages = side_stages(model, UNLIKE, layout, phase)
        speeds = [UNLIKE[s.tp] for s in stages]
        none, ends = [0.0] * len(stages), [0.0] * len(stages)
        ends[0], ends[-1] = speeds[0].embedding, ends[-1] + speeds[-1].head
        if len(stages) == 1:
            ends = [speeds[0].embedding + speeds[0].head]
        encode, decode = [s.encode for s in speeds], [s.decode for s in speeds]
        parts = []
        if name == "t5-3b":
            parts += [(9, encode, none, [s.encoder_layers for s in stages])] if phase != "decode" else []
            parts += [(11, decode, ends, [s.decoder_layers for s in stages])] if phase != "encode" else []
        else:
            both = [e + d for e, d in zip(encode, decode, strict=True)]
            each = {"encode": encode, "decode": decode, "both": both}[phase]
            parts = [(11, each, none if phase == "encode" else ends, [s.decoder_layers for s in stages])]
        for layers, each, other, ranges in parts:
            check_layers(ranges, layers)
            cuts = itertools.combinations(range(1, layers), len(stages) - 1)
            splits = [[b - a for a, b in itertools.pairwise((0, *cut, layers))] for cut in cuts]
            slowest = [max(n * s + end for n, s, end in zip(split, each, other, strict=True)) for split in splits]
            split = [b - a for a, b in ranges]
            assert slowest[splits.index(split)] == pytest.approx(min(slowest)), (layout, phase)


def test_uniform_stages_have_the_encoders_layers_too():
    model, cluster = builtin_model("t5-3b"), cluster_of(1, 4)
    stages = uniform_stages(model, cluster, 2)
    check_layers([s.encoder_layers for s in stages], model.encoder_layers)
    assert [s.devices for s in stages] == [(0, 1), (2, 3)] and {s.tp for s in stages} == {2}
    assert all(s.encoder_layers is None for s in uniform_stages(builtin_model("gpt2"), cluster, 2))


def test_a_stage_may_have_a_single_layer():
    """As many stages as layers, and no more."""
    model = replace(builtin_model("gpt2"), layers=4)
    assert tp_degrees(model, cluster_of(1, 4)) == (1, 2, 4) and tp_degrees(model, cluster_of(2, 4))[0] == 2
    assert [layout.degree for layout in uniform_layouts(model, 4, 4, (1, 2))] == [1, 2]
    assert [layout.degree for layout in uniform_layouts(model, 8, 4, (1, 2))] == [2]


def test_a_layers_time_is_all_of_its_parts():
    """Encoding per prompt, decoding per query with all of its iterations."""
    workload, profile = task("S"), small_specs.profile()
    speed, tables = layer_speeds(workload, profile)[1], profile.degree(1).decoder
    for part in ("rest", "encode_attention", "decode_attention"):
        none = replace(getattr(tables, part), values=(0.0,) * len(getattr(tables, part).values))
        degree = replace(profile.degree(1), decoder=replace(tables, **{part: none}))
        without = layer_speeds(workload, replace(profile, degrees=(degree,)))[1]
        assert (without.encode < speed.encode) == (part != "decode_attention")
        assert (without.decode < speed.decode) == (part != "encode_attention")


def test_a_layers_time_is_a_querys_share_of_a_batch():
    """Of a prompt among eight, and of a sequence among 64 in each of its output's iterations."""
    workload, profile = task("S"), small_specs.profile()
    speed, tables = layer_speeds(workload, profile)[1], profile.degree(1).decoder
    prompt, output, context = workload.input.mean, workload.output.mean, length_biased_context(workload)
    prefill_s = tables.rest.at(8 * prompt) + tables.encode_attention.at(8, prompt)
    decode_s = tables.rest.at(64) + tables.decode_attention.at(64, context)
    assert speed.encode == pytest.approx(prefill_s / 8)
    assert speed.decode == pytest.approx(output * decode_s / 64)


@pytest.mark.parametrize(("end", "other"), [("embedding", "head"), ("head", "embedding")])
def test_the_ends_of_a_pipeline_have_times_of_their_own(end, other):
    """Of all tokens of a query, in batches of 64."""
    workload, profile = task("S"), small_specs.profile()
    speed, table = layer_speeds(workload, profile)[1], getattr(profile.degree(1), end)
    assert getattr(speed, end) == pytest.approx(workload.output.mean * table.at(64) / 64)
    degree = replace(profile.degree(1), **{end: replace(table, values=(0.0,) * len(table.values))})
    without = layer_speeds(workload, replace(profile, degrees=(degree,)))[1]
    assert (getattr(without, end), getattr(without, other)) == (0.0, getattr(speed, other))
