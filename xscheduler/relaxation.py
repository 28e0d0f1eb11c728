"""Relaxation: the gain of a schedule if one bound, the memory or a fixed variable were 10% larger."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from xcore.duration import duration_text
from xcore.quantity import percent_text
from xscheduler.advice import TIMES, WIDTHS
from xscheduler.candidates import Candidates, allocation
from xscheduler.refine import refined
from xscheduler.search import search
from xscheduler.search_problem import SearchProblem
from xscheduler.space import Evaluation, Point
from xscheduler.spaces import at_value, refined_variable, spaces

RELAXED = 1.1
"""Factor by which each limit is raised."""
_TENTH = "10%"
LEAST_GAIN = 0.005
"""Smaller gains count as none: token budgets are searched in steps of this size."""
_STEPS = (1.15, 1.04)
"""Ratios of neighbouring values, as `refine.STEPS`, but wider: explanations may take a third of the answer's time."""


@dataclass(frozen=True)
class Gain:
    """The largest gain in throughput from relaxing a single limit."""

    name: str
    """The name of a constraint or a variable."""
    limit: float
    """The present limit: seconds, a share of the memory, or a number."""
    share: float
    """Relative gain in throughput. A lower bound, since the search is coarser than the answer's."""

    @property
    def text(self) -> str:
        """The advice: what to raise, and its gain."""
        more = f"would give at least {percent_text(self.share)} more throughput"
        if self.name in TIMES:
            times = (duration_text(seconds) for seconds in (RELAXED * self.limit, self.limit))
            return f"a bounded {TIMES[self.name]} of {' instead of '.join(times)} {more}"
        if self.name == "memory":
            return f"{_TENTH} more memory {more}"
        if self.name in WIDTHS:
            return f"at most {self.limit:,.0f} sequences are decoded at once; {_TENTH} more sequences {more}"
        return f"{self.name} is fixed; {self.name}={_raised(int(self.limit))} instead of {self.limit:.0f} {more}"


def largest_gain(
    searched: Sequence[Candidates], point: Point, problem: SearchProblem, tolerance: float, leads: bool
) -> Gain | None:
    """Return the largest gain of a single constraint or fixed variable; None if there is no gain.

    The first of the `searched` spaces holds the policy's best `point`. Other allocations are searched only if the
    policy `leads`. The fullest constraint is raised first; other raises must exceed its gain.
    """
    own, by_key = searched[0], {_key(space): space for space in searched}
    best, batch = own.at(point), own.values(point)[0]
    asked = problem if leads else replace(problem, fixed=problem.fixed | allocation(own))
    gain, floor = None, best.throughput * (1 + LEAST_GAIN)
    for name, limit, fullness in _raises(own, best, problem):
        if name == "memory" and not leads and fullness * (1 + 1 / batch) <= 1:
            continue  # a larger batch would fit, so another bound excludes it
        throughput = _Looser(_looser(asked, name), name, fullness, own, by_key).reached(tolerance, floor)
        if throughput > floor:
            gain, floor = Gain(name, limit, throughput / best.throughput - 1), throughput
    return gain


def _raises(own: Candidates, best: Evaluation, problem: SearchProblem) -> Iterator[tuple[str, float, float]]:
    """Yield name, limit and used share of what can be raised: fixed variables, then constraints, the fullest first."""
    controls = own.controls(own.values(own.lowest))
    yield from ((name, value, 1.0) for name, value in problem.fixed.items() if name in controls)
    fullness = [figure / constraint.limit for figure, constraint in zip(best.figures, own.constraints, strict=True)]
    for full, constraint in sorted(zip(fullness, own.constraints, strict=True), key=lambda pair: -pair[0]):
        if constraint.name not in WIDTHS:
            yield constraint.name, constraint.limit, full
        elif widest := problem.widest[1]:  # None: any number that a schedule allows
            yield constraint.name, widest, full


def _raised(value: int) -> int:
    return math.ceil(round(RELAXED * value, 6))


def _looser(problem: SearchProblem, name: str) -> SearchProblem:
    """Return the problem with a constraint or fixed variable raised."""
    limits = problem.limits
    if name in problem.fixed:
        return replace(problem, fixed=problem.fixed | {name: _raised(problem.fixed[name])})
    if name in TIMES:
        seconds = f"{name}_s"
        return replace(problem, limits=replace(limits, **{seconds: RELAXED * getattr(limits, seconds)}))
    if name in WIDTHS:
        return replace(problem, wider=RELAXED)
    cost_model = replace(problem.cost_model, cluster=problem.cost_model.cluster.with_memory(RELAXED))
    blocks = limits.kv_blocks and _raised(limits.kv_blocks)
    return replace(problem, cost_model=cost_model, limits=replace(limits, kv_blocks=blocks))


def _key(space: Candidates) -> tuple[object, ...]:
    """Return the key by which spaces of two problems have the same points."""
    others = tuple(variable.values for variable in space.variables[1:])
    return space.where.replica.stages, tuple(space.constants.items()), others


@dataclass(frozen=True)
class _Looser:
    """A problem with one constraint or fixed variable raised."""

    problem: SearchProblem
    name: str
    """The constraint or variable that is raised."""
    fullness: float
    """Share of the limit that the best evaluation uses."""
    own: Candidates
    """The best space of the unchanged problem."""
    searched: dict[tuple[object, ...], Candidates]
    """All spaces of the unchanged problem, by key."""

    def reached(self, tolerance: float, floor: float) -> float:
        """Return the best throughput in tokens/s, or 0.

        Searches the grid and the space like `own`, then refined values that may gain.
        """
        policy, problem = self.own.policy, self.problem
        name = refined_variable(policy, problem)
        members = spaces(policy, problem)
        lines = [self._as_known(space) for space in members if isinstance(space, Candidates)]
        if len(lines) < len(members):  # families: their policies refine nothing
            return search(members, "bnb", tolerance, floor).throughput
        alike = self._alike(name, lines) if name else []
        lines, reached = [*alike, *(s for s in lines if s.ceiling > floor and self._matters(s))], 0.0
        if not name or self.name not in TIMES or self.fullness <= 1 / RELAXED:
            reached = search(lines, "bnb", tolerance, floor).throughput
            if not name or not reached:
                return reached
        _, closer = refined(lines, name, self._at_value, "bnb", tolerance, max(floor, reached), _STEPS)
        return max(reached, closer.throughput)

    def _alike(self, name: str, lines: list[Candidates]) -> list[Candidates]:
        """Return the space with `own`'s allocation and constants, in a list; an empty list if memory is too small."""
        stages, constants = self.own.where.replica.stages, self.own.constants
        for space in lines:
            if space.where.replica.stages == stages and space.constants | {name: 0} == constants | {name: 0}:
                alike = self._at_value(space, constants[name])
                return [alike] if alike else []
        return []

    def _at_value(self, like: Candidates, value: int) -> Candidates | None:
        space = at_value(self.problem, like, value)
        return space and self._as_known(space)

    def _as_known(self, space: Candidates) -> Candidates:
        """Return the space, with the points already known from the tighter bound."""
        before = self.searched.get(_key(space)) if self.name in TIMES else None
        if before is None or before.variables != space.variables:
            return space
        return replace(before, constraints=space.constraints, ceiling=space.ceiling)

    def _matters(self, space: Candidates) -> bool:
        """Return whether more memory may admit points. It doesn't if another bound excluded a line's last point."""
        before = self.searched.get(_key(space))
        if self.name != "memory" or before is None or len(space.variables) > 1:
            return True
        figures = before.at(before.highest).figures
        return not any(
            constraint.never_meets(figure)
            for figure, constraint in zip(figures, before.constraints, strict=True)
            if constraint.name != "memory"
        )
