"""Groups: which models share devices, which have their own, and how many, so that the least headroom is greatest.

Every model is in one group, alone or with others, and a group has devices for itself. A group does no better than a
part of it on as many devices. So a level that all should reach gives each group a least number of devices, which falls
with no model that joins; a plan of the level exists exactly if some partition's least numbers have room on the nodes.

The search raises the level from the best that is known by `STEP` at a time. What a group reaches is measured only where
a partition of the level needs it: until then it counts as the most that it could do. Either all groups of a partition
reach the level, which then rises to what they reach, or one is known to miss it. When no partition is left, nothing
reaches the level: what was found is the best but for a step.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from xscheduler.multimodel.budgets import counts, place

STEP = 0.02
"""Share by which a plan must be better than the one before it."""
_LEAST = 1e-9

Group = tuple[int, ...]
"""Models by their places, rising."""
Part = tuple[Group, int]
"""A group, and a number of devices for it."""


class Measure(Protocol):
    """What groups of models do on numbers of devices."""

    def at_most(self, group: Group, devices: int) -> float:
        """The common headroom that a group can't exceed; 0 where it can't run."""

    def reached(self, parts: Sequence[Part], level: float) -> "list[float | None]":
        """The common headroom of each; None where nothing is known but that it is below a level."""


@dataclass(frozen=True)
class Grouping:
    """Which groups have which devices, and the headroom that every model has."""

    parts: tuple[Part, ...]
    devices: tuple[tuple[int, ...], ...]
    headroom: float


@dataclass(frozen=True)
class Cluster:
    """Nodes that are alike."""

    nodes: int
    devices_per_node: int

    @property
    def devices(self) -> int:
        """Of all nodes."""
        return self.nodes * self.devices_per_node

    def sizes(self, group: Group) -> list[int]:
        """Numbers of devices for a group: several models share 2^k of one node."""
        if len(group) == 1:
            return counts(self.nodes, self.devices_per_node)
        return [1 << k for k in range(self.devices_per_node.bit_length())]


class GroupSearch:
    """Finds the best partition into groups; remembers what was measured."""

    def __init__(self, models: int, cluster: Cluster, measure: Measure, known: dict[Part, float] | None = None):
        """`known` are headrooms that other methods' plans reach; a measurement may find more."""
        self._models, self._cluster, self._measure = models, cluster, measure
        self._reached = dict(known or {})
        self._limits: dict[Part, float] = {}
        """What was measured: of a group that missed a level, just below that."""
        self.measured = 0
        """How many groups on numbers of devices so far."""
        self.complete = True
        """Whether nothing was left that could have been better."""

    def best(
        self, floor: float, most: int, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> Grouping | None:
        """The grouping with the most headroom, where that is `STEP` above a floor; None where there is none, or none
        was found with `most` measurements.
        """
        best: Grouping | None = None
        level = max(floor * (1 + STEP), _LEAST)
        while parts := self._likeliest(level):
            unknown = [part for part in parts if not self._reaches(part, level)]
            if not unknown:
                headroom = min(self._reached[part] for part in parts)
                best = Grouping(parts, self._placed(parts), headroom)
                if headroom == math.inf:
                    break
                level = headroom * (1 + STEP)
            elif self.measured + len(unknown) > most:
                self.complete = False
                break
            else:
                progress(self.measured, most)
                self._ask(unknown, level)
        return best

    def at_most(self, group: Group, devices: int) -> float:
        """What a group can't exceed."""
        part = group, devices
        limit = self._limits[part] if part in self._limits else self._measure.at_most(group, devices)
        parts_of = (
            limit
            for (other, number), limit in self._limits.items()
            if number == devices and 1 < len(other) < len(group) and set(other) < set(group)
        )
        return max(min([limit, *parts_of]), self._reached.get(part, 0.0))

    def _reaches(self, part: Part, level: float) -> bool:
        return self._reached.get(part, 0.0) >= level

    def _ask(self, unknown: list[Part], level: float) -> None:
        self.measured += len(unknown)
        for part, headroom in zip(unknown, self._measure.reached(unknown, level), strict=True):
            self._limits[part] = _below(level) if headroom is None else headroom
            if headroom is not None:
                self._reached[part] = max(headroom, self._reached.get(part, 0.0))

    def _likeliest(self, level: float) -> tuple[Part, ...] | None:
        """Of the partitions that could reach a level, with the least devices of their groups, that of which fewest are
        unknown, and of those the one that could do most; None where there is none.
        """
        least: dict[Group, int | None] = {}

        def least_of(group: Group) -> int | None:
            if group not in least:
                sizes = self._cluster.sizes(group)
                least[group] = next((k for k in sizes if self.at_most(group, k) >= level), None)
            return least[group]

        def order(parts: tuple[Part, ...]) -> tuple[int, float]:
            unknown = [part for part in parts if not self._reaches(part, level)]
            return -len(unknown), min((self.at_most(*part) for part in unknown), default=level)

        return max(filter(self._room, self._partitions(least_of)), key=order, default=None)

    def _partitions(self, least_of: Callable[[Group], int | None]) -> Iterator[tuple[Part, ...]]:
        """Partitions whose groups' least devices are no more than the cluster has, one model after the other."""

        def extend(groups: list[Group], model: int) -> Iterator[tuple[Part, ...]]:
            numbers = [number for group in groups if (number := least_of(group))]
            if len(numbers) < len(groups) or sum(numbers) > self._cluster.devices:
                return
            if model == self._models:
                yield tuple(zip(groups, numbers, strict=True))
                return
            for joins, group in enumerate(groups):
                yield from extend([*groups[:joins], (*group, model), *groups[joins + 1 :]], model + 1)
            yield from extend([*groups, (model,)], model + 1)

        yield from extend([], 0)

    def _room(self, parts: tuple[Part, ...]) -> bool:
        sizes = [devices for _, devices in parts]
        return place(sizes, self._cluster.nodes, self._cluster.devices_per_node) is not None

    def _placed(self, parts: tuple[Part, ...]) -> tuple[tuple[int, ...], ...]:
        placed = place([devices for _, devices in parts], self._cluster.nodes, self._cluster.devices_per_node)
        assert placed is not None, "it has room"
        return placed


def _below(level: float) -> float:
    return math.nextafter(level, 0.0)
