"""Assign layers to devices (docs/theory.md): tensor-parallel groups, pipeline stages, and the best split of the layers.

Some devices form tensor-parallel groups. The pipeline stages cover all devices.
The split of the layers makes the slowest stage as fast as possible.
"""

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from xcore.errors import InputError
from xcore.specs.cluster import ClusterSpec
from xcore.specs.model import ModelSpec
from xcore.specs.profile import LayerTables, Profile
from xcore.specs.schedule import Stage
from xcore.specs.workload import Workload
from xsimulator.steady.residents import length_biased_context


@dataclass(frozen=True)
class Layout:
    """Partial tensor parallelism (T_P): `gpus` of the `devices` form groups of `degree`; the others form no group."""

    devices: int
    degree: int = 1
    gpus: int = 0

    @property
    def degrees(self) -> tuple[int, ...]:
        """The tensor-parallel degree of every stage: groups first."""
        return (self.degree,) * (self.gpus // self.degree) + (1,) * (self.devices - self.gpus)


def tp_degrees(model: ModelSpec, cluster: ClusterSpec) -> tuple[int, ...]:
    """Return the tensor-parallel degrees that suit the whole cluster.

    Groups stay within a node, divide its devices, and leave at least one layer for every stage.
    """
    return tuple(
        tp
        for tp in model.tp_degrees(cluster.devices_per_node)
        if cluster.devices_per_node % tp == 0 and cluster.devices // tp <= model.layers
    )


def uniform_layouts(model: ModelSpec, devices: int, per_node: int, degrees: Sequence[int]) -> tuple[Layout, ...]:
    """Return the layouts of `devices` devices in groups of one degree, with at least one layer for every stage.

    `per_node` has the same meaning as in `_stands`.
    """
    return tuple(
        Layout(devices, tp, devices if tp > 1 else 0)
        for tp in degrees
        if devices % tp == 0 and _stands(tp, devices, per_node) and devices // tp <= most_stages(model)
    )


def _stands(tp: int, devices: int, per_node: int) -> bool:
    """Return whether consecutive groups of `tp` of a replica's devices all stay within a node of `per_node`."""
    return tp <= per_node if devices <= per_node else per_node % tp == 0


def partial_layouts(model: ModelSpec, devices: int, per_node: int, degrees: Sequence[int]) -> tuple[Layout, ...]:
    """Return all layouts of `devices` devices, with at least one layer for every stage.

    Every degree is combined with every multiple of it. `per_node` has the same meaning as in `_stands`.
    """
    layouts = [Layout(devices)] if 1 in degrees and devices <= most_stages(model) else []
    for tp in degrees:
        if tp == 1 or not _stands(tp, devices, per_node):
            continue
        for gpus in range(tp, devices + 1, tp):
            alone = devices - gpus
            if (alone and 1 not in degrees) or gpus // tp + alone > most_stages(model):
                continue
            layouts.append(Layout(devices, tp, gpus))
    return tuple(layouts)


def most_stages(model: ModelSpec) -> int:
    """Return the largest number of stages that a model can be split into."""
    return min(model.layers, model.encoder_layers or model.layers)


def replica_sizes(cluster: ClusterSpec) -> tuple[int, ...]:
    """Return the device counts that one replica may have, in rising order: a part of a node, or whole nodes."""
    node = cluster.devices_per_node
    return (*range(1, node + 1), *(n * node for n in range(2, cluster.nodes + 1)))


def most_replicas(cluster: ClusterSpec, devices: int) -> int:
    """Return how many replicas of `devices` devices fit on the cluster.

    A replica is a part of one node, or whole nodes. The remaining devices of each node stay idle.
    """
    node = cluster.devices_per_node
    return cluster.nodes * (node // devices) if devices <= node else cluster.nodes // (devices // node)


def minimax_split(layers: int, layer_seconds: Sequence[float], other_seconds: Sequence[float]) -> tuple[int, ...]:
    """Return the layers of every stage, at least one each, that minimize the time of the slowest stage.

    The time of a stage is `layers · layer_seconds + other_seconds`. The result is exact. Stages share only the number
    of layers, so a greedy choice is optimal: each layer goes to the stage whose time with this layer is the lowest.
    """
    if not len(layer_seconds) <= layers:
        raise InputError(
            f"{layers} layers can't be split into {len(layer_seconds)} stages: each stage needs at least one layer."
        )
    counts = [1] * len(layer_seconds)
    both = zip(layer_seconds, other_seconds, strict=True)
    queue = [(2 * layer + other, i) for i, (layer, other) in enumerate(both)]
    heapq.heapify(queue)
    for _ in range(layers - len(counts)):
        seconds, i = heapq.heappop(queue)
        counts[i] += 1
        heapq.heappush(queue, (seconds + layer_seconds[i], i))
    return tuple(counts)


_PROMPTS, _SEQUENCES = 8, 64
"""Prompts prefilled together and sequences decoded together, at which the speeds of layers are compared."""


@dataclass(frozen=True)
class LayerSpeed:
    """Seconds per query on the devices of one tensor-parallel group."""

    encode: float
    """Seconds of one layer that encodes."""
    decode: float
    """Seconds of one layer that decodes, over all iterations."""
    embedding: float
    head: float


def layer_speeds(workload: Workload, profile: Profile) -> dict[int, LayerSpeed]:
    """Return the speeds at every tensor-parallel degree of the profile."""
    prompt, output = workload.input.mean, workload.output.mean
    speeds = {}
    for tables in profile.degrees:
        encoder: LayerTables = tables.encoder or tables.decoder
        encode = encoder.rest.at(_PROMPTS * prompt) + encoder.encode_attention.at(_PROMPTS, prompt)
        context = length_biased_context(workload, tables.encoder is not None)
        decode = tables.decoder.rest.at(_SEQUENCES) + tables.decoder.decode_attention.at(_SEQUENCES, context)
        share = output / _SEQUENCES
        ends = tables.embedding.at(_SEQUENCES), tables.head.at(_SEQUENCES)
        speeds[tables.tp] = LayerSpeed(encode / _PROMPTS, decode * share, ends[0] * share, ends[1] * share)
    return speeds


Speeds = dict[int, LayerSpeed]


def both_stages(model: ModelSpec, speeds: Speeds, layout: Layout) -> tuple[Stage, ...]:
    """Return stages that encode and decode (RRA and the policies with one pipeline)."""
    return side_stages(model, speeds, layout, "both")


def side_stages(
    model: ModelSpec,
    speeds: Speeds,
    layout: Layout,
    phase: Literal["both", "encode", "decode"],
    offset: int = 0,
) -> tuple[Stage, ...]:
    """Return the stages that run one phase, on the devices from `offset` on.

    WAA's encoding side has the first devices and its groups first. The decoding side has the last devices and its
    groups last. Nodes begin and end there, and no group may cross a node boundary.
    """
    degrees = layout.degrees[::-1] if phase == "decode" else layout.degrees
    encoders, decoders = _splits(model, speeds, degrees, phase)
    stages, device, encoder, decoder = [], offset, 0, 0
    for i, tp in enumerate(degrees):
        encoder_stop, decoder_stop = (
            encoder + (encoders[i] if encoders else 0),
            decoder + (decoders[i] if decoders else 0),
        )
        stages.append(
            Stage(
                tuple(range(device, device + tp)),
                tp,
                phase,
                (encoder, encoder_stop) if encoders else None,
                (decoder, decoder_stop) if decoders else None,
            )
        )
        device, encoder, decoder = device + tp, encoder_stop, decoder_stop
    return tuple(stages)


def _splits(
    model: ModelSpec, speeds: Speeds, degrees: Sequence[int], phase: str
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Return the encoder and the decoder layers of every stage; None if the phase has no such layers."""
    each = [speeds[tp] for tp in degrees]
    nothing = [0.0] * len(each)
    outer = list(nothing)
    outer[0] += each[0].embedding
    outer[-1] += each[-1].head
    encode, decode = [speed.encode for speed in each], [speed.decode for speed in each]
    if model.encoder_layers:
        encoders = minimax_split(model.encoder_layers, encode, nothing) if phase != "decode" else None
        return encoders, minimax_split(model.layers, decode, outer) if phase != "encode" else None
    if phase == "encode":
        return None, minimax_split(model.layers, encode, nothing)
    layer = decode if phase == "decode" else [e + d for e, d in zip(encode, decode, strict=True)]
    return None, minimax_split(model.layers, layer, outer)


def uniform_stages(
    model: ModelSpec, cluster: ClusterSpec, tp: int, layers: tuple[int, ...] | None = None
) -> tuple[Stage, ...]:
    """Return pipeline stages of `tp` devices each over the whole cluster.

    `layers` holds the number of contiguous layers of each stage, for a decoder-only model.
    None: as even a split as possible.
    """
    if tp not in tp_degrees(model, cluster):
        fit = ", ".join(map(str, tp_degrees(model, cluster)))
        raise InputError(
            f"A tensor-parallel degree of {tp} doesn't fit model '{model.name}' on {cluster.name}: use one of {fit}."
        )
    count = cluster.devices // tp
    if layers and (len(layers), sum(layers)) != (count, model.layers):
        raise InputError(
            f"Stages of {', '.join(map(str, layers))} layers aren't {count} stages with the {model.layers} layers "
            f"of '{model.name}': pass the layers of each stage."
        )

    def cuts(whole: int) -> list[tuple[int, int] | None]:
        edges = [round(i * whole / count) for i in range(count + 1)]
        if layers and whole == model.layers:
            edges = [0, *itertools.accumulate(layers)]
        return [(a, b) if whole else None for a, b in itertools.pairwise(edges)]

    pairs = zip(cuts(model.encoder_layers), cuts(model.layers), strict=True)
    return tuple(
        Stage(tuple(range(i * tp, (i + 1) * tp)), tp, "both", encoder, decoder)
        for i, (encoder, decoder) in enumerate(pairs)
    )
