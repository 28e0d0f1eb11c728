"""Ties: choose the policy of the answer if several policies are equally good."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from xcore.policies import TRAITS

TIE = 5e-3
"""Throughputs or goodputs that differ by this share are equally good: a tenth of the prediction error."""

One = TypeVar("One")


def preferred(
    candidates: Iterable[One],
    value: Callable[[One], float],
    policy: Callable[[One], str],
) -> One | None:
    """Return the candidate of the simplest policy among those whose value is within a tie of the best value.

    None without candidates.
    """
    ranked = sorted(candidates, key=value, reverse=True)
    if not ranked:
        return None
    as_good = [alternative for alternative in ranked if value(alternative) >= value(ranked[0]) * (1 - TIE)]
    return min(as_good, key=lambda alternative: TRAITS[policy(alternative)].complexity)
