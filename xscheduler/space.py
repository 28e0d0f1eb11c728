"""Spaces: control variables, the figures of a point, and its constraints (docs/theory.md)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Point = tuple[int, ...]
"""One index into every variable's values."""


@dataclass(frozen=True)
class Variable:
    """A control variable, with its `values` in the order in which the constraints' figures rise or fall."""

    name: str
    values: Sequence[int]
    throughput_rises: bool = True
    """Whether throughput can be trusted to rise along the values too.

    If not, a box that spans several of them is not pruned by its throughput.
    """
    peaks: tuple[int, ...] = ()
    """Places of values, rising, after which throughput may fall for a while; between them it rises."""


@dataclass(frozen=True)
class Constraint:
    """A figure that must stay at or below `limit`.

    `rises`: for every variable, whether the figure rises along its values (True) or falls (False). The figure is lowest
    at a corner that depends on these directions, and only this corner can prune a box.
    """

    name: str
    limit: float
    rises: tuple[bool, ...]
    slack: float = 0.0
    """The share by which the figure may fall nevertheless, from any point to any point above it."""

    def never_meets(self, lowest: float, tolerance: float = 0.0) -> bool:
        """Return whether no point of a box meets the constraint, given the figure at its lowest corner."""
        return lowest * (1 - self.slack) > self.limit * (1 + tolerance)


@dataclass(frozen=True)
class Evaluation:
    """The result of one point: throughput, and the figure of each constraint in order.

    Throughput rises along the variables, except as `best_below` and `no_better_above` describe.
    """

    throughput: float
    figures: tuple[float, ...]
    best_below: float = 0.0
    """A throughput that no lower point exceeds, if it is more than this point's."""
    no_better_above: bool = False
    """Whether no higher point has more throughput."""


@dataclass(eq=False)
class Space:
    """A grid of points. `simulate` takes the variables' values; each point is simulated at most once.

    `ceiling`, if known, is a throughput that no feasible point exceeds. A search with a better point skips the space.
    """

    name: str
    variables: tuple[Variable, ...]
    constraints: tuple[Constraint, ...]
    simulate: Callable[[tuple[int, ...]], Evaluation]
    ceiling: float = math.inf
    # filled by the searches
    known: dict[Point, Evaluation] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The number of points."""
        return math.prod(len(v.values) for v in self.variables)

    @property
    def lowest(self) -> Point:
        """The corner with the lowest throughput."""
        return (0,) * len(self.variables)

    @property
    def highest(self) -> Point:
        """The corner with the highest throughput."""
        return tuple(len(v.values) - 1 for v in self.variables)

    def values(self, point: Point) -> tuple[int, ...]:
        """Return the variables' values at a point."""
        return tuple(v.values[i] for v, i in zip(self.variables, point, strict=True))

    def at(self, point: Point) -> Evaluation:
        """Return the evaluation of a point; it is simulated once."""
        if point not in self.known:
            self.known[point] = self.simulate(self.values(point))
        return self.known[point]

    def meets(self, point: Point) -> bool:
        """Return whether a point meets every constraint."""
        figures = self.at(point).figures
        return all(f <= c.limit for f, c in zip(figures, self.constraints, strict=True))


@dataclass(eq=False)
class Family:
    """Spaces with a common ceiling, made only when a search reaches it: large clusters have very many spaces."""

    name: str
    ceiling: float
    size: int
    """The number of points of all its spaces."""
    make: Callable[[], Sequence[Space]]
    # filled by the searches
    made: Sequence[Space] | None = None

    @property
    def spaces(self) -> Sequence[Space]:
        """The spaces; they are made once."""
        if self.made is None:
            self.made = self.make()
        return self.made


def all_spaces(members: Sequence[Space | Family]) -> list[Space]:
    """Return every space, including those of families."""
    return [s for member in members for s in (member.spaces if isinstance(member, Family) else (member,))]


def made_spaces(members: Sequence[Space | Family]) -> list[Space]:
    """Return every space that a search has made."""
    return [s for member in members for s in (member.made or () if isinstance(member, Family) else (member,))]


@dataclass
class Incumbent:
    """The best feasible point so far, over all spaces of a search."""

    throughput: float = 0.0
    space: Space | None = None
    point: Point = ()

    def offer(self, space: Space, point: Point) -> None:
        """Keep a point if it is feasible and better."""
        if space.at(point).throughput > self.throughput and space.meets(point):
            self.throughput, self.space, self.point = space.at(point).throughput, space, point
