"""Relaxation: what a schedule would gain if one of its bounds, or a variable fixed by hand, were a tenth more."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from exegpt.duration import duration_text
from exegpt.quantity import percent_text
from exegpt.workload import MAX_TOKENS
from xscheduler.advice import TIMES, WIDTHS
from xscheduler.candidates import Candidates, candidates
from xscheduler.ceilings import Bounds
from xscheduler.question import Question
from xscheduler.search import search
from xscheduler.space import Constraint, Space, Variable

RELAXED = 1.1
"""Factor by which each limit is raised."""
_TENTH = "10%"
LEAST_GAIN = 0.005
"""Smaller ones are none: budgets are searched in steps that matter as little."""
_NEAR = 0.8
"""Spaces are looked at again whose ceiling reaches this share of the throughput."""
_APART = 1.15
"""Ratio of token budgets that are looked at again."""
_FURTHER = 1.5
"""Factor by which batches grow where there is 10% more memory."""


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


def largest_gain(spaces: Sequence[Candidates], question: Question, throughput: float, tolerance: float) -> Gain | None:
    """Return the gain of the constraint or fixed variable that gives most where it alone is raised, over spaces of
    a policy with the one of this throughput among them; None where none gives anything.
    """
    near = _thinned([space for space in spaces if space.ceiling >= _NEAR * throughput])
    policy = near[0].policy
    raised: list[tuple[str, float, list[Space]]] = [
        (
            constraint.name,
            _limit(question, constraint),
            [_looser(space, constraint.name) for space in near if _matters(space, constraint.name)],
        )
        for constraint in near[0].constraints
    ]
    for name, value in question.fixed.items():
        if any(name in space.controls(space.values(space.lowest)) for space in near):
            raised.append((name, value, [_moved(space, policy, question, name) for space in near]))
    gains = []
    for name, limit, members in raised:
        found = search(members, "bnb", tolerance, throughput * (1 + LEAST_GAIN))
        if found.space:
            gains.append(Gain(name, limit, found.throughput / throughput - 1))
    return max(gains, key=lambda gain: gain.share, default=None)


def _thinned(spaces: Sequence[Candidates]) -> list[Candidates]:
    """Without those whose token budget is close to another one's on the same allocation."""
    kept: dict[object, Candidates] = {}
    for space in spaces:
        budget = math.log(space.constants.get("max_num_batched_tokens", 1), _APART)
        constants = tuple(value for name, value in space.constants.items() if name != "max_num_batched_tokens")
        kept.setdefault((space.where, space.variables[1:], constants, round(budget)), space)
    return list(kept.values())


def _limit(question: Question, constraint: Constraint) -> float:
    """A constraint's limit; of sequences decoded at once their number."""
    return float(question.widest[1] or MAX_TOKENS) if constraint.name in WIDTHS else constraint.limit


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
    return Space(space.name, variables, constraints, space.simulate, known=space.known)


def _further(space: Candidates) -> Variable:
    """The batches, and more of them as far as a token budget takes them; one that was fixed stays."""
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
