"""Relaxation: what a schedule would gain if one of its bounds, or a variable fixed by hand, were a tenth more."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from exegpt.duration import duration_text
from exegpt.quantity import percent_text
from xscheduler.advice import TIMES, WIDTHS
from xscheduler.candidates import Candidates, candidates
from xscheduler.ceilings import Bounds
from xscheduler.question import Question
from xscheduler.search import search
from xscheduler.space import Constraint, Evaluation, Space, Variable

RELAXED = 1.1
"""Factor by which each limit is raised."""
_TENTH = "10%"
LEAST_GAIN = 0.005
"""Smaller ones are none: budgets are searched in steps that matter as little."""
_NEAR = 0.9
"""A ceiling's share of that under a looser constraint, at least: spaces whose ceiling is below are left out."""
_APART = 1.15
"""Ratio of token budgets that are looked at again."""
_FURTHER = 1.5
"""Factor by which batches grow where there is 10% more memory."""

Raise = tuple[str, float, Callable[[Candidates], Space]]
"""A constraint or variable, its present limit, and a space with it raised."""


@dataclass(frozen=True)
class Gain:
    """The largest gain."""

    name: str
    """A constraint or a variable."""
    limit: float
    """The present limit: seconds, a share of the memory, or a number."""
    share: float
    """The throughput then over that now, less 1."""

    @property
    def text(self) -> str:
        """Return what is to be raised, and what it gives."""
        more = f"would give {percent_text(self.share)} more throughput"
        if self.name in TIMES:
            times = (duration_text(seconds) for seconds in (RELAXED * self.limit, self.limit))
            return f"a bounded {TIMES[self.name]} of {' instead of '.join(times)} {more}"
        if self.name == "memory":
            return f"{_TENTH} more of it {more}"
        if self.name in WIDTHS:
            return f"at most {self.limit:,.0f} sequences are decoded at once, and {_TENTH} more {more}"
        return f"{self.name}={_raised(int(self.limit))} instead of {self.limit:.0f}, which is fixed, {more}"


def largest_gain(
    spaces: Sequence[Candidates], best: Evaluation, question: Question, policy: str, tolerance: float
) -> Gain | None:
    """Return the largest gain of a constraint or fixed variable that is raised by itself; None where none gains.

    `spaces` are the policy's, the one of its `best` evaluation first. The fullest constraint is raised first: the
    others must exceed its gain.
    """
    own, *others = spaces
    near = _thinned([own, *(space for space in others if space.ceiling >= _NEAR * best.throughput)])
    gain, floor = None, best.throughput * (1 + LEAST_GAIN)
    for name, limit, looser in _raises(near, best, question, policy):
        result = search([looser(space) for space in near if _matters(space, name)], "bnb", tolerance, floor)
        if result.space:
            gain, floor = Gain(name, limit, result.throughput / best.throughput - 1), result.throughput
    return gain


def _raises(near: Sequence[Candidates], best: Evaluation, question: Question, policy: str) -> Iterator[Raise]:
    """Yield what may be raised, and how: fixed variables, then constraints, the fullest first."""
    for name, value in question.fixed.items():
        if any(name in space.controls(space.values(space.lowest)) for space in near):
            yield name, value, functools.partial(_moved, policy=policy, question=question, name=name)
    fullness = [figure / constraint.limit for figure, constraint in zip(best.figures, near[0].constraints, strict=True)]
    for place in sorted(range(len(fullness)), key=lambda place: -fullness[place]):
        constraint = near[0].constraints[place]
        if constraint.name in WIDTHS and question.widest[1] is None:
            continue  # any number that a schedule may say
        yield constraint.name, _limit(question, constraint), functools.partial(_looser, name=constraint.name)


def _thinned(spaces: Sequence[Candidates]) -> list[Candidates]:
    """Without those whose token budget is close to an earlier one's on the same allocation."""
    kept: dict[object, Candidates] = {}
    for space in spaces:
        budget = math.log(space.constants.get("max_num_batched_tokens", 1), _APART)
        constants = tuple(value for name, value in space.constants.items() if name != "max_num_batched_tokens")
        kept.setdefault((space.where, space.variables[1:], constants, round(budget)), space)
    return list(kept.values())


def _limit(question: Question, constraint: Constraint) -> float:
    """Return a constraint's limit; for sequences decoded at once, their number."""
    return float(question.widest[1] or 0) if constraint.name in WIDTHS else constraint.limit


def _matters(space: Candidates, name: str) -> bool:
    """Return whether a looser constraint may admit more points: more memory, only where nothing else ends the batches
    before.
    """
    if name != "memory":
        return True
    last = (len(space.variables[0].values) - 1, *space.lowest[1:])
    return all(
        figure <= constraint.limit
        for figure, constraint in zip(space.at(last).figures, space.constraints, strict=True)
        if constraint.name != name
    )


def _raised(value: int) -> int:
    return math.ceil(round(RELAXED * value, 6))


def _looser(space: Candidates, name: str) -> Space:
    """The same points under a constraint that is looser; further ones where it is the memory."""
    constraints = tuple(
        replace(constraint, limit=RELAXED * constraint.limit) if constraint.name == name else constraint
        for constraint in space.constraints
    )
    variables = space.variables
    if name == "memory":
        variables = (_further(space), *variables[1:])
    return Space(space.name, variables, constraints, space.simulate, space.ceiling / _NEAR, known=space.known)


def _further(space: Candidates) -> Variable:
    """Return the batches with further ones, as far as a token budget takes them; a fixed one stays."""
    batches = space.variables[0]
    if not isinstance(batches.values, range):
        return batches
    most = min(math.ceil(_FURTHER * batches.values[-1]), space.constants.get("max_num_batched_tokens", math.inf))
    return replace(batches, values=range(batches.values[0], max(int(most), batches.values[-1]) + 1))


def _moved(space: Candidates, policy: str, question: Question, name: str) -> Space:
    """The same space with a fixed variable raised."""
    variables = tuple(
        replace(variable, values=(_raised(variable.values[0]),)) if variable.name == name else variable
        for variable in space.variables
    )
    constants = {key: _raised(value) if key == name else value for key, value in space.constants.items()}
    return candidates(policy, question, lambda: space.where, variables, Bounds(math.inf, 0.0), **constants)
