"""Spaces: control variables, what a point gives, and what it must keep to (docs/theory.md)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Point = tuple[int, ...]
"""One index into every variable's values."""


@dataclass(frozen=True)
class Variable:
    """A control variable. `values` are in the order in which the constraints' figures rise or fall."""

    name: str
    values: Sequence[int]
    throughput_rises: bool = True
    """Whether throughput can be trusted to rise along the values too. Where not, no box that spans several of them is
    judged by its throughput."""


@dataclass(frozen=True)
class Constraint:
    """A figure that must stay at or below `limit`.

    `rises`: for every variable, whether the figure rises along its values (True) or falls (False): the constraint
    prunes a box from its own corners only.
    """

    name: str
    limit: float
    rises: tuple[bool, ...]
    slack: float = 0.0
    """The share by which the figure may fall nevertheless, from any point to any above."""

    def never_meets(self, lowest: float, tolerance: float = 0.0) -> bool:
        """Whether no point above meets it, where the figure is this at the point where it should be lowest."""
        return lowest * (1 - self.slack) > self.limit * (1 + tolerance)


@dataclass(frozen=True)
class Evaluation:
    """What one point gives: throughput, and the figure of each constraint in order.

    Throughput rises along the variables, except as `crest` and `falls` describe.
    """

    throughput: float
    figures: tuple[float, ...]
    crest: float = 0.0
    """A throughput that no point below exceeds, where it is more than this one's."""
    falls: bool = False
    """Whether no point above gives more."""


@dataclass(eq=False)
class Space:
    """A grid of points. `simulate` takes the variables' values; each point is simulated at most once.

    `ceiling`, where it is known, is a throughput that no feasible point exceeds: a search that has found more never
    looks at the space.
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
        """How many points there are."""
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
        """The variables' values at a point."""
        return tuple(v.values[i] for v, i in zip(self.variables, point, strict=True))

    def at(self, point: Point) -> Evaluation:
        """What a point gives, simulated once."""
        if point not in self.known:
            self.known[point] = self.simulate(self.values(point))
        return self.known[point]

    def meets(self, point: Point) -> bool:
        """Whether a point keeps to every constraint."""
        figures = self.at(point).figures
        return all(f <= c.limit for f, c in zip(figures, self.constraints, strict=True))


@dataclass(eq=False)
class Family:
    """Spaces that share a ceiling and are made only where a search gets down to it: large clusters have very many."""

    name: str
    ceiling: float
    size: int
    """Points of all of them."""
    make: Callable[[], Sequence[Space]]
    # filled by the searches
    made: Sequence[Space] | None = None

    @property
    def spaces(self) -> Sequence[Space]:
        """The spaces, made once."""
        if self.made is None:
            self.made = self.make()
        return self.made


def all_spaces(members: Sequence[Space | Family]) -> list[Space]:
    """Every space, those of families too."""
    return [s for member in members for s in (member.spaces if isinstance(member, Family) else (member,))]


def made_spaces(members: Sequence[Space | Family]) -> list[Space]:
    """Every space that a search has made."""
    return [s for member in members for s in (member.made or () if isinstance(member, Family) else (member,))]


@dataclass
class Incumbent:
    """The best feasible point so far, over all spaces of a search."""

    throughput: float = 0.0
    space: Space | None = None
    point: Point = ()

    def offer(self, space: Space, point: Point) -> None:
        """Take a point if it is feasible and better."""
        if space.at(point).throughput > self.throughput and space.meets(point):
            self.throughput, self.space, self.point = space.at(point).throughput, space, point
