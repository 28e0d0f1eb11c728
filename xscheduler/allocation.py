"""Layers to devices (docs/theory.md): tensor-parallel groups on some devices, pipeline stages over all of them, and the
split of the layers that makes the slowest stage quickest.
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
    """Partial tensor parallelism (T_P): `gpus` of `devices` devices stand in groups of `degree`, the others alone."""

    devices: int
    degree: int = 1
    gpus: int = 0

    @property
    def degrees(self) -> tuple[int, ...]:
        """The tensor-parallel degree of every stage: groups first."""
        return (self.degree,) * (self.gpus // self.degree) + (1,) * (self.devices - self.gpus)


def tp_degrees(model: ModelSpec, cluster: ClusterSpec) -> tuple[int, ...]:
    """Tensor-parallel degrees of the whole cluster: groups stay within a node, divide its devices, and leave every
    stage a layer.
    """
    return tuple(
        tp
        for tp in model.tp_degrees(cluster.devices_per_node)
        if cluster.devices_per_node % tp == 0 and cluster.devices // tp <= model.layers
    )


def uniform_layouts(model: ModelSpec, devices: int, per_node: int, degrees: Sequence[int]) -> tuple[Layout, ...]:
    """Layouts of `devices` devices in groups of one degree, each stage with a layer at least; `per_node` as in
    `_stands`.
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
    """All layouts of `devices` devices: every degree on every multiple of it, each stage with a layer at least;
    `per_node` as in `_stands`.
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
    """Stages that a model can be split into."""
    return min(model.layers, model.encoder_layers or model.layers)


def replica_sizes(cluster: ClusterSpec) -> tuple[int, ...]:
    """Devices that one replica may have, rising: a part of a node, or whole nodes."""
    node = cluster.devices_per_node
    return (*range(1, node + 1), *(n * node for n in range(2, cluster.nodes + 1)))


def most_replicas(cluster: ClusterSpec, devices: int) -> int:
    """Replicas of so many devices for which the cluster has room. None shares a node with a part of another; devices
    that are left over, in each node, stay idle.
    """
    node = cluster.devices_per_node
    return cluster.nodes * (node // devices) if devices <= node else cluster.nodes // (devices // node)


def minimax_split(layers: int, layer_seconds: Sequence[float], other_seconds: Sequence[float]) -> tuple[int, ...]:
    """Layers for every stage, one at least each, so that the slowest stage, `layers · layer_seconds + other_seconds`,
    is as quick as can be. Exact: dealing one layer after the other to the stage that then is quickest is optimal, for
    stages share nothing but the number of layers.
    """
    if not len(layer_seconds) <= layers:
        raise InputError(f"{layers} layers can't be split into {len(layer_seconds)} stages: each needs one at least.")
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
"""Prompts encoded and sequences decoded together, at which the speed of layers is compared."""


@dataclass(frozen=True)
class LayerSpeed:
    """Seconds per query on the devices of one tensor-parallel group."""

    encode: float
    """Of one layer that encodes."""
    decode: float
    """Of one layer that decodes, all iterations."""
    embedding: float
    head: float


def layer_speeds(workload: Workload, profile: Profile) -> dict[int, LayerSpeed]:
    """The speeds at every tensor-parallel degree of the profile."""
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
    """Stages that encode and decode (RRA and the policies of one pipeline)."""
    return side_stages(model, speeds, layout, "both")


def side_stages(
    model: ModelSpec,
    speeds: Speeds,
    layout: Layout,
    phase: Literal["both", "encode", "decode"],
    offset: int = 0,
) -> tuple[Stage, ...]:
    """The stages that one phase runs through, on the devices from `offset` on.

    WAA's encoding side has the first devices and its groups first, the decoding side the last and its groups last:
    there nodes begin and end, which no group may cross.
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
    """Encoder and decoder layers of every stage; None where the phase has none."""
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
    """Pipeline stages of `tp` devices each over the whole cluster, with so many contiguous layers of a decoder-only
    model each; None: as even as can be.
    """
    if tp not in tp_degrees(model, cluster):
        fit = ", ".join(map(str, tp_degrees(model, cluster)))
        raise InputError(
            f"A tensor-parallel degree of {tp} doesn't fit model '{model.name}' on {cluster.name}: use one of {fit}."
        )
    count = cluster.devices // tp
    if layers and (len(layers), sum(layers)) != (count, model.layers):
        raise InputError(
            f"Stages of {', '.join(map(str, layers))} layers aren't {count} stages of the {model.layers} layers of "
            f"'{model.name}': name the layers of each stage."
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
