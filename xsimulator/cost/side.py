"""Side: the pipeline stages that one phase runs through, and what iterations take on all of them at once.

Decoding is asked for most often, so here each stage's share of it is one table, of as many sequences as an iteration
has, beside the attention: what a `Group` tells of its parts, added up beforehand for what the stages hold.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from exegpt.schedule import Stage
from exegpt.workload import LengthDistribution
from xsimulator.cost.group import Group, PartSeconds
from xsimulator.cost.recurrences import decode_seconds
from xsimulator.cost.stage import StageCost

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class DecodeTable:
    """Seconds of decoding iterations on the stages of one tensor-parallel degree."""

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
    def of(group: Group, places: list[int], costs: list[StageCost]) -> "DecodeTable":
        """Of the stages at these places."""
        points, parts, attention = group.decode_parts
        holds = np.array([(cost.layers, cost.first, cost.last, 1.0) for cost in costs], dtype=np.float64)
        return DecodeTable(np.array(places, dtype=np.intp), holds[:, 0].copy(), points, parts @ holds.T, attention)


@dataclass(frozen=True, eq=False)
class Side:
    """The stages that one phase runs through, in order, and what iterations cost on each."""

    stages: tuple[Stage, ...]
    costs: tuple[StageCost, ...]

    @functools.cached_property
    def _of_groups(self) -> tuple[tuple[Group, list[int], list[StageCost]], ...]:
        """Every tensor-parallel degree's group, where its stages stand, and their costs."""
        places_of: dict[Group, list[int]] = {}
        for place, cost in enumerate(self.costs):
            places_of.setdefault(cost.group, []).append(place)
        return tuple((group, places, [self.costs[i] for i in places]) for group, places in places_of.items())

    @functools.cached_property
    def _holds(self) -> tuple[tuple[Group, NDArray[np.intp], tuple[Array | None, ...]], ...]:
        """Every group, where its stages stand, and how much of each part of its work they hold."""
        held_by_group = []
        for group, places, costs in self._of_groups:
            rows = [(c.layers, c.encoder_layers, c.first, c.last, 1.0) for c in costs]
            holds = (np.array(part, dtype=np.float64) for part in zip(*rows, strict=True))
            held_by_group.append((group, np.array(places), tuple(part if part.any() else None for part in holds)))
        return tuple(held_by_group)

    @functools.cached_property
    def _decode_tables(self) -> tuple[DecodeTable, ...]:
        return tuple(DecodeTable.of(*group_stages) for group_stages in self._of_groups)

    def each(self, part_seconds: Callable[[Group], PartSeconds]) -> Array:
        """Seconds on every stage, [..., stages]: its share of the `part_seconds` of its group."""
        columns = []
        for group, _, holds in self._holds:
            scaled = zip(vars(part_seconds(group)).values(), holds, strict=True)
            columns.append(sum(np.asarray(part)[..., None] * held for part, held in scaled if held is not None))
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

    def encode_deviation(self, batch: float, distribution: LengthDistribution) -> float:
        """Standard deviation of the slowest stage's time to encode `batch` prompts: their lengths' sum varies."""
        if (batch, id(distribution)) not in self._deviations:
            self._deviations[batch, id(distribution)] = self._encode_deviation(batch, distribution)
        return self._deviations[batch, id(distribution)]

    @functools.cached_property
    def _deviations(self) -> dict[tuple[float, int], float]:
        return {}

    def _encode_deviation(self, batch: float, distribution: LengthDistribution) -> float:
        lengths = distribution.mean * np.array([0.95, 1.05])
        shorter, longer = self.each(lambda group: group.encode_fixed(batch, lengths))
        slope = float((longer - shorter).max()) / (0.1 * distribution.mean * batch)
        return float(slope * batch**0.5 * distribution.std)

    def cross_projection(self, tokens: float) -> Array:
        """[stages]: seconds in which an encoder-decoder's decoders take over `tokens` encoded tokens."""
        if not self.costs[0].encoder_decoder:
            return np.zeros(len(self.costs))
        return np.array([float(cost.cross_projection(tokens)) for cost in self.costs])
