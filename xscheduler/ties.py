"""Ties: which policy is the answer where several are as good."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from xcore.policies import TRAITS

TIE = 5e-3
"""Throughputs, or goodputs, that differ by this share are as good: a tenth of what predictions are off by."""

One = TypeVar("One")


def preferred(
    candidates: Iterable[One],
    value: Callable[[One], float],
    policy: Callable[[One], str],
) -> One | None:
    """Of the candidates whose value is within a tie of the best one's, that of the simplest policy; None for
    no candidate.
    """
    ranked = sorted(candidates, key=value, reverse=True)
    if not ranked:
        return None
    as_good = [alternative for alternative in ranked if value(alternative) >= value(ranked[0]) * (1 - TIE)]
    return min(as_good, key=lambda alternative: TRAITS[policy(alternative)].complexity)
