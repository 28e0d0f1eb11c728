"""How monotone a space really is (paper Table 5): the share of neighbouring points that break the order."""

import itertools
from dataclasses import dataclass

from xscheduler.space import Space


@dataclass(frozen=True)
class Violations:
    """Shares of the pairs of neighbours along one variable that break monotonicity by more than the tolerance."""

    variable: str
    throughput: float
    figures: tuple[float, ...]
    """By constraint."""


def violations(space: Space, tolerance: float) -> tuple[Violations, ...]:
    """Every variable's violations over the whole space, which is simulated; a constraint's own slack is none."""
    broken = []
    for k, variable in enumerate(space.variables):
        pairs = 0
        slower = 0
        wrong = [0] * len(space.constraints)
        ranges = [range(len(v.values) - (i == k)) for i, v in enumerate(space.variables)]
        for point in itertools.product(*ranges):
            low, high = space.at(point), space.at((*point[:k], point[k] + 1, *point[k + 1 :]))
            pairs += 1
            slower += high.throughput < low.throughput * (1 - tolerance)
            for number, constraint in enumerate(space.constraints):
                first, second = low.figures[number], high.figures[number]
                first, second = (first, second) if constraint.rises[k] else (second, first)
                wrong[number] += second < first * (1 - max(tolerance, constraint.slack))
        share = max(pairs, 1)
        broken.append(Violations(variable.name, slower / share, tuple(w / share for w in wrong)))
    return tuple(broken)
