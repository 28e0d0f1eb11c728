"""Side: the pipeline stages that one phase runs through, and the seconds of iterations on all of them.

Decoding is looked up most often. Each stage's decode cost apart from attention is therefore one table by the number of
sequences of an iteration. The table adds the parts of the `Group` up beforehand, for the parts that the stage holds.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from xcore.arrays import Array, Places
from xcore.specs.profile import Table
from xcore.specs.schedule import Stage
from xsimulator.cost.group import PARTS, Group, PartSeconds
from xsimulator.cost.recurrences import decode_seconds
from xsimulator.cost.stage import StageCost


@dataclass(frozen=True, eq=False)
class DecodeTableCache:
    """A cache of `StageCost.decode` for the stages of one tensor-parallel degree: the sums of their tables."""

    places: Places
    """[stages]: each stage's index in the side."""
    layers: Array
    """[stages]: decoder layers."""
    sequences: Array
    """[points]: the sequences of an iteration at which `rest` is known."""
    rest: Array
    """[points, stages]: seconds of everything but attention, by the sequences of an iteration."""
    attention: tuple[Array, Array, Array]
    """One layer's attention: batches, contexts, and seconds [batches, contexts]."""

    @staticmethod
    def of(group: Group, places: list[int], costs: list[StageCost]) -> "DecodeTableCache":
        """Build the tables of the stages with these indices."""
        points, parts, attention = group.decode_parts
        holds = np.array([(cost.layers, cost.first, cost.last, 1.0) for cost in costs], dtype=np.float64)
        return DecodeTableCache(np.array(places, dtype=np.intp), holds[:, 0].copy(), points, parts @ holds.T, attention)


@dataclass(frozen=True)
class Links:
    """The links over which hidden states go from one stage to the next."""

    devices_per_node: int
    token_bytes: float
    """Bytes of one token's hidden states."""
    within_node: Table
    """Seconds by bytes."""
    between_nodes: Table


@dataclass(frozen=True, eq=False)
class Side:
    """The stages that one phase runs through, in order, and the cost of iterations on each."""

    stages: tuple[Stage, ...]
    costs: tuple[StageCost, ...]
    links: Links

    @functools.cached_property
    def _of_groups(self) -> tuple[tuple[Group, list[int], list[StageCost]], ...]:
        """Return for every tensor-parallel degree: the group, the indices of its stages, and their costs."""
        places_of: dict[Group, list[int]] = {}
        for place, cost in enumerate(self.costs):
            places_of.setdefault(cost.group, []).append(place)
        return tuple((group, places, [self.costs[i] for i in places]) for group, places in places_of.items())

    @functools.cached_property
    def _holds(self) -> tuple[tuple[Group, Places, tuple[tuple[str, Array], ...]], ...]:
        """Return every group, the indices of its stages, and how much of each part they hold.

        Parts that none of the stages holds are left out.
        """
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
        """Return the seconds on every stage, [..., stages]: its share of its group's `part_seconds`."""
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
        """Return the seconds of decode steps on every stage: the arguments' shape and [stages].

        A step has `batch` sequences (at least one) with the mean context `context`, including the token being decoded.
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
        """Return [stages]: seconds for the keys and values of `tokens` encoded tokens in an encoder-decoder; else 0."""
        if not self.costs[0].encoder_decoder:
            return np.zeros(len(self.costs))
        return np.array([float(cost.cross_projection(tokens)) for cost in self.costs])

    def hops(self, tokens: float) -> Array:
        """Return [stages]: seconds to send the hidden states of `tokens` tokens to each stage; 0 for the first."""
        sent, (near, far) = tokens * self.links.token_bytes, self._hops
        seconds: Array = np.zeros(len(self.stages))
        if near is not None:
            seconds += near * self.links.within_node.at(sent)
        if far is not None:
            seconds += far * self.links.between_nodes.at(sent)
        return seconds

    @property
    def rows(self) -> int:
        """Return the tokens that an iteration computes of each decoding sequence."""
        return self.costs[0].group.rows

    def decode_hops(self, sequences: float) -> Array:
        """Return `hops` of an iteration that decodes `sequences` sequences."""
        return self.hops(self.rows * sequences)

    def hops_of(self, tokens: Array) -> Array:
        """Return `hops` for an array of tokens: its shape and [stages]."""
        sent, (near, far) = tokens * self.links.token_bytes, self._hops
        seconds: Array = np.zeros((*tokens.shape, len(self.stages)))
        if near is not None:
            seconds += np.multiply.outer(self.links.within_node(sent), near)
        if far is not None:
            seconds += np.multiply.outer(self.links.between_nodes(sent), far)
        return seconds

    def hops_together(self, tokens: float) -> float:
        """Return the sum of the seconds of all hops."""
        sent, (near, far) = tokens * self.links.token_bytes, self._hop_counts
        seconds = near * self.links.within_node.at(sent) if near else 0.0
        return seconds + (far * self.links.between_nodes.at(sent) if far else 0.0)

    @functools.cached_property
    def _hops(self) -> tuple[Array | None, Array | None]:
        """Return two masks [stages] of 1 and 0: hops within a node, and hops between nodes; None if there are none."""
        node = [[rank // self.links.devices_per_node for rank in stage.devices] for stage in self.stages]
        crosses = np.array([0.0, *(float(a[-1] != b[0]) for a, b in itertools.pairwise(node))])
        first = np.array([0.0, *([1.0] * (len(node) - 1))])
        near = first * (1 - crosses)
        return near if near.any() else None, crosses if crosses.any() else None

    @functools.cached_property
    def _hop_counts(self) -> tuple[float, float]:
        """Return the number of hops within a node, and between nodes."""
        near, far = self._hops
        return 0.0 if near is None else float(near.sum()), 0.0 if far is None else float(far.sum())
