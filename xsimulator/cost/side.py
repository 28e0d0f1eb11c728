"""Side: the pipeline stages that one phase runs through, and what iterations take on all of them at once.

Decoding is asked for most often, so here each stage's share of it is one table, of as many sequences as an iteration
has, beside the attention: what a `Group` tells of its parts, added up beforehand for what the stages hold.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xcore.specs.profile import Table
from xcore.specs.schedule import Stage
from xsimulator.cost.group import PARTS, Group, PartSeconds
from xsimulator.cost.recurrences import decode_seconds
from xsimulator.cost.stage import StageCost

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class DecodeTableCache:
    """A cache of `StageCost.decode` for the stages of one tensor-parallel degree: its tables, added up."""

    places: NDArray[np.intp]
    """[stages]: where in the side."""
    layers: Array
    """[stages]"""
    sequences: Array
    """[points]"""
    rest: Array
    """[points, stages]: all but attention, by the sequences of an iteration."""
    attention: tuple[Array, Array, Array]
    """One layer's: batches, contexts, and [batches, contexts]."""

    @staticmethod
    def of(group: Group, places: list[int], costs: list[StageCost]) -> "DecodeTableCache":
        """Of the stages at these places."""
        points, parts, attention = group.decode_parts
        holds = np.array([(cost.layers, cost.first, cost.last, 1.0) for cost in costs], dtype=np.float64)
        return DecodeTableCache(np.array(places, dtype=np.intp), holds[:, 0].copy(), points, parts @ holds.T, attention)


@dataclass(frozen=True)
class Links:
    """How hidden states go from one stage to the next."""

    devices_per_node: int
    token_bytes: float
    """Of one token's hidden states."""
    within_node: Table
    """Seconds by bytes."""
    between_nodes: Table


@dataclass(frozen=True, eq=False)
class Side:
    """The stages that one phase runs through, in order, and what iterations cost on each."""

    stages: tuple[Stage, ...]
    costs: tuple[StageCost, ...]
    links: Links

    @functools.cached_property
    def _of_groups(self) -> tuple[tuple[Group, list[int], list[StageCost]], ...]:
        """Every tensor-parallel degree's group, where its stages stand, and their costs."""
        places_of: dict[Group, list[int]] = {}
        for place, cost in enumerate(self.costs):
            places_of.setdefault(cost.group, []).append(place)
        return tuple((group, places, [self.costs[i] for i in places]) for group, places in places_of.items())

    @functools.cached_property
    def _holds(self) -> tuple[tuple[Group, NDArray[np.intp], tuple[tuple[str, Array], ...]], ...]:
        """Every group, where its stages stand, and how much they hold of each part of its work, as far as any does."""
        held_by_group = []
        for group, places, costs in self._of_groups:
            amounts: dict[str, list[float]] = {
                "layer": [cost.layers for cost in costs],
                "encoder_layer": [cost.encoder_layers for cost in costs],
                "embedding": [cost.first for cost in costs],
                "head": [cost.last for cost in costs],
                "engine": [1.0] * len(costs),
            }
            held = tuple((part, np.array(amounts[part], dtype=np.float64)) for part in PARTS if any(amounts[part]))
            held_by_group.append((group, np.array(places), held))
        return tuple(held_by_group)

    @functools.cached_property
    def _decode_tables(self) -> tuple[DecodeTableCache, ...]:
        return tuple(DecodeTableCache.of(*group_stages) for group_stages in self._of_groups)

    def each(self, part_seconds: Callable[[Group], PartSeconds]) -> Array:
        """Seconds on every stage, [..., stages]: its share of the `part_seconds` of its group."""
        columns = []
        for group, _, holds in self._holds:
            parts = part_seconds(group)
            columns.append(sum(np.asarray(getattr(parts, part))[..., None] * held for part, held in holds))
        if len(columns) == 1:
            return np.asarray(columns[0], dtype=np.float64)
        seconds = np.empty((*np.shape(columns[0])[:-1], len(self.stages)))
        for (_, places, _), column in zip(self._holds, columns, strict=True):
            seconds[..., places] = column
        return seconds

    def decode(self, batch: ArrayLike, context: ArrayLike) -> Array:
        """Seconds on every stage of decoding iterations of `batch` sequences (at least one) with these mean contexts,
        the token being decoded included: the arguments' shape and [stages].
        """
        if any(group.watched for group, _, _ in self._of_groups):
            return self.each(lambda group: group.decode(batch, context))
        n, c = np.asarray(batch, dtype=np.float64, order="C"), np.asarray(context, dtype=np.float64, order="C")
        if n.shape != c.shape:
            n, c = (np.ascontiguousarray(a) for a in np.broadcast_arrays(n, c))
        seconds = np.empty((*n.shape, len(self.stages)))
        for t in self._decode_tables:
            decode_seconds(t.places, t.layers, t.sequences, t.rest, *t.attention, n, c, seconds)
        return seconds

    def cross_projection(self, tokens: float) -> Array:
        """[stages]: seconds in which an encoder-decoder's decoders take over `tokens` encoded tokens."""
        if not self.costs[0].encoder_decoder:
            return np.zeros(len(self.costs))
        return np.array([float(cost.cross_projection(tokens)) for cost in self.costs])

    def hops(self, tokens: float) -> Array:
        """[stages]: seconds to hand the hidden states of `tokens` tokens to each stage; 0 for the first."""
        sent, (near, far) = tokens * self.links.token_bytes, self._hops
        seconds: Array = np.zeros(len(self.stages))
        if near is not None:
            seconds += near * self.links.within_node.at(sent)
        if far is not None:
            seconds += far * self.links.between_nodes.at(sent)
        return seconds

    def hops_of(self, tokens: Array) -> Array:
        """`hops` of an array: its shape and [stages]."""
        sent, (near, far) = tokens * self.links.token_bytes, self._hops
        seconds: Array = np.zeros((*tokens.shape, len(self.stages)))
        if near is not None:
            seconds += np.multiply.outer(self.links.within_node(sent), near)
        if far is not None:
            seconds += np.multiply.outer(self.links.between_nodes(sent), far)
        return seconds

    def hops_together(self, tokens: float) -> float:
        """Seconds of all hops together."""
        sent, (near, far) = tokens * self.links.token_bytes, self._hop_counts
        seconds = near * self.links.within_node.at(sent) if near else 0.0
        return seconds + (far * self.links.between_nodes.at(sent) if far else 0.0)

    @functools.cached_property
    def _hops(self) -> tuple[Array | None, Array | None]:
        """[stages] each: whether the hop to a stage stays within a node, and whether it leaves one; None: no hop."""
        node = [[rank // self.links.devices_per_node for rank in stage.devices] for stage in self.stages]
        crosses = np.array([0.0, *(float(a[-1] != b[0]) for a, b in itertools.pairwise(node))])
        first = np.array([0.0, *([1.0] * (len(node) - 1))])
        near = first * (1 - crosses)
        return near if near.any() else None, crosses if crosses.any() else None

    @functools.cached_property
    def _hop_counts(self) -> tuple[float, float]:
        """Hops within a node, and between nodes."""
        near, far = self._hops
        return 0.0 if near is None else float(near.sum()), 0.0 if far is None else float(far.sum())
