"""RateDrift: a test of whether requests still arrive at the planned rate, with a bounded probability of a false alarm.

The Shiryaev–Roberts statistic sums the likelihood ratio of a changed rate against the planned one over all possible
times s of the change:

    R(t) = ∫ L(s, t) ds,    L(s, t) = ratio^n · exp(-(changed - near) · (t - s)),    ratio = changed / near

with n arrivals between s and t. It is in seconds. If arrivals are Poisson at `near`, R(t) - t is a martingale; at any
rate on the planned side of `near`, a supermartingale. So R exceeds A within T seconds with a probability of at most T /
A (Ville's inequality), however often it is checked. A mean over a window has no such bound: checked often enough, it
exceeds any threshold.

There are two statistics, for a higher and for a lower rate; their mean has the same bound.
"""

import math

TOLERATED = 1.25
"""Rates within this factor count as unchanged: rates in a models file are no more exact, and a plan keeps a margin of
15 % of every bound.
"""
CHANGED = 2.0
"""The factor of the tested change: twice or half as many requests. Smaller changes are detected too, but later."""


class RateDrift:
    """The test of one model with a planned rate of `planned_seq_s` sequences per second."""

    def __init__(self, planned_seq_s: float):
        self._sides = {
            side: _Side(planned_seq_s * TOLERATED**sign, planned_seq_s * CHANGED**sign)
            for side, sign in (("higher", 1), ("lower", -1))
        }

    def come(self, count: int, seconds: float) -> None:
        """Add `count` arrivals within the next `seconds`."""
        for side in self._sides.values():
            side.come(count, seconds)

    @property
    def statistic_s(self) -> float:
        """R in seconds; infinite if it exceeds the range of floats."""
        sides = [side.log_s for side in self._sides.values()]
        most = max(sides)
        if most > _MOST_LOG:
            return math.inf
        return sum(math.exp(log_s) for log_s in sides) / len(sides)

    @property
    def side(self) -> str:
        """Whether a `higher` or a `lower` rate is likelier."""
        return max(self._sides, key=lambda side: self._sides[side].log_s)


_MOST_LOG = 700.0
"""Largest argument of a float's exponential."""


class _Side:
    """The statistic of a rate that has changed from at most `near` (the planned rate) to `changed`, per second."""

    def __init__(self, near: float, changed: float):
        self._ratio_log, self._slope = math.log(changed / near), changed - near
        self.log_s = -math.inf
        """ln R."""

    def come(self, count: int, seconds: float) -> None:
        """Add `count` arrivals in the next `seconds`.

        The rate may have changed at the beginning of these seconds, at an earlier such moment, or not at all.
        """
        begun = _log_sum(self.log_s, math.log(seconds))
        self.log_s = begun + count * self._ratio_log - self._slope * seconds


def _log_sum(a: float, b: float) -> float:
    """Return ln(e^a + e^b)."""
    most, least = max(a, b), min(a, b)
    return most + math.log1p(math.exp(least - most))
