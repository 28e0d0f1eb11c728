"""Groups: a partition of models into groups with devices, so that the least headroom is as large as possible.

Every model is in one group, alone or with others, and each group has its devices alone. On as many devices, a group
does no better than a part of it. So for each level every group has a least number of devices, which never falls when a
model joins. The level can be reached exactly if the least numbers of some partition fit on the nodes.

The search raises the level from the best known one by `STEP` at a time. A group is measured only if a partition of
the level needs it: until then its upper bound counts. Either all groups of a partition reach the level, which then
rises to what they reach, or one is known to miss it. When no partition remains, the level can't be reached: the best
known grouping is optimal within a step.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from xmulti.sharing.budgets import counts, place

STEP = 0.02
"""Share by which a grouping must be better than the previous one."""
_LEAST = 1e-9

Group = tuple[int, ...]
"""Indices of models, ascending."""
Part = tuple[Group, int]
"""A group, and a number of devices for it."""


class Measure(Protocol):
    """The performance of groups of models on numbers of devices."""

    def at_most(self, group: Group, devices: int) -> float:
        """Return an upper bound on the group's common headroom; 0 if it can't run."""

    def reached(self, parts: Sequence[Part], level: float) -> "list[float | None]":
        """Return the common headroom of each group; None if it is only known to be below `level`."""


@dataclass(frozen=True)
class Grouping:
    """Groups with their devices, and the least headroom of all models."""

    parts: tuple[Part, ...]
    devices: tuple[tuple[int, ...], ...]
    headroom: float


@dataclass(frozen=True)
class IdenticalNodes:
    """Identical nodes."""

    nodes: int
    devices_per_node: int
    spans: bool = True
    """Whether a model alone may have devices of several whole nodes."""

    @property
    def devices(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.devices_per_node

    def sizes(self, group: Group) -> list[int]:
        """Possible numbers of devices for a group: several models share 2^k devices of one node."""
        if len(group) == 1:
            return counts(self.nodes if self.spans else 1, self.devices_per_node)
        return [1 << k for k in range(self.devices_per_node.bit_length())]


class GroupSearch:
    """Finds the best partition into groups; remembers measurements."""

    def __init__(
        self,
        models: int,
        cluster: IdenticalNodes,
        measure: Measure,
        known: Mapping[Part, float] | None = None,
        later: Mapping[Part, Callable[[], float]] | None = None,
    ):
        """Set up the search; `known` are headrooms of other methods' plans, and a measurement may find more.

        Functions in `later` give such headrooms when they are needed; these count as known, not as measured.
        """
        self._models, self._cluster, self._measure = models, cluster, measure
        self._reached = dict(known or {})
        self._later = dict(later or {})
        self._limits: dict[Part, float] = {}
        """Measured headrooms; for a group that missed a level, a value just below it."""
        self.measured = 0
        """Number of measurements so far."""
        self.complete = True
        """Whether no candidate was left that could have been better."""

    def best(
        self, floor: float, most: int, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> Grouping | None:
        """Return the grouping with the most headroom, if that is `STEP` above the floor.

        Return None if `most` measurements find no such grouping.
        """
        best: Grouping | None = None
        level = max(floor * (1 + STEP), _LEAST)
        while parts := self._likeliest(level):
            unknown = [part for part in parts if not self._reaches(part, level)]
            if not unknown:
                headroom = min(map(self._known, parts))
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
        """Return the upper bound of a group."""
        part = group, devices
        limit = self._limits[part] if part in self._limits else self._measure.at_most(group, devices)
        parts_of = (
            limit
            for (other, number), limit in self._limits.items()
            if number == devices and 1 < len(other) < len(group) and set(other) < set(group)
        )
        return max(min([limit, *parts_of]), self._reached.get(part, 0.0))

    def _known(self, part: Part) -> float:
        """Return the headroom that a group is known to reach."""
        if part in self._later:
            self._reached[part] = max(self._later.pop(part)(), self._reached.get(part, 0.0))
        return self._reached.get(part, 0.0)

    def _reaches(self, part: Part, level: float) -> bool:
        return self._reached.get(part, 0.0) >= level or self._known(part) >= level

    def _may_reach(self, part: Part, level: float) -> bool:
        return self.at_most(*part) >= level or self._reaches(part, level)

    def _ask(self, unknown: list[Part], level: float) -> None:
        self.measured += len(unknown)
        for part, headroom in zip(unknown, self._measure.reached(unknown, level), strict=True):
            self._limits[part] = _below(level) if headroom is None else headroom
            if headroom is not None:
                self._reached[part] = max(headroom, self._reached.get(part, 0.0))

    def _likeliest(self, level: float) -> tuple[Part, ...] | None:
        """Return the most promising partition that could reach a level; None if there is none.

        Its groups have their least numbers of devices. Of all such partitions, it has the fewest unmeasured groups;
        among equal ones, it has the highest bound.
        """
        least: dict[Group, int | None] = {}

        def least_of(group: Group) -> int | None:
            if group not in least:
                sizes = self._cluster.sizes(group)
                least[group] = next((k for k in sizes if self._may_reach((group, k), level)), None)
            return least[group]

        def order(parts: tuple[Part, ...]) -> tuple[int, float]:
            unknown = [part for part in parts if not self._reaches(part, level)]
            return -len(unknown), min((self.at_most(*part) for part in unknown), default=level)

        return max(filter(self._room, self._partitions(least_of)), key=order, default=None)

    def _partitions(self, least_of: Callable[[Group], int | None]) -> Iterator[tuple[Part, ...]]:
        """Yield the partitions whose groups' least numbers of devices fit the cluster, built model by model."""

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
