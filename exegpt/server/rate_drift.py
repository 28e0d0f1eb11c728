"""RateDrift: whether requests still come at the rate that was planned, by a test with a stated probability of a false
alarm.

Shiryaev's and Roberts' statistic: the sum, over all moments at which the rate may have changed, of how much likelier
what has come since is at a changed rate than at the planned one,

    R(t) = ∫ L(s, t) ds,    L(s, t) = ratio^n · exp(-(changed - near) · (t - s)),    ratio = changed / near

with n arrivals between s and t. It is in seconds. Where arrivals are Poisson at `near`, R(t) - t is a martingale; at
any rate on the planned one's side of `near`, a supermartingale. So R exceeds A within T seconds with a probability of
at most T / A (Ville's inequality), however often it is looked at. A mean over a window has no such bound: looked at
often enough, it exceeds any threshold.

There are two of them, for a higher rate and for a lower one; their mean has the same bound.
"""

import math

TOLERATED = 1.25
"""Rates that differ by less are no drift: what people write as a rate is no more exact, and a plan keeps 15 % of every
bound as its margin.
"""
CHANGED = 2.0
"""By what the rate is taken to have changed: twice as many requests, or half as many. Smaller changes are found, too,
only later.
"""


class RateDrift:
    """Of one model, whose requests are planned to come at `planned_seq_s`, in sequences per second."""

    def __init__(self, planned_seq_s: float):
        self._sides = {
            side: _Side(planned_seq_s * TOLERATED**sign, planned_seq_s * CHANGED**sign)
            for side, sign in (("higher", 1), ("lower", -1))
        }

    def come(self, count: int, seconds: float) -> None:
        """So many have come in the next `seconds`."""
        for side in self._sides.values():
            side.come(count, seconds)

    @property
    def statistic_s(self) -> float:
        """R in seconds; infinite where no float is as large."""
        sides = [side.log_s for side in self._sides.values()]
        most = max(sides)
        if most > _MOST_LOG:
            return math.inf
        return sum(math.exp(log_s) for log_s in sides) / len(sides)

    @property
    def side(self) -> str:
        """Whether a `higher` rate is likelier, or a `lower` one."""
        return max(self._sides, key=lambda side: self._sides[side].log_s)


_MOST_LOG = 700.0
"""Of a float's exponential."""


class _Side:
    """The statistic of a rate that has changed from at most `near` planned to `changed`, both per second."""

    def __init__(self, near: float, changed: float):
        self._ratio_log, self._slope = math.log(changed / near), changed - near
        self.log_s = -math.inf
        """ln R."""

    def come(self, count: int, seconds: float) -> None:
        """The rate may have changed at the beginning of these seconds, at every earlier such moment, or not at all."""
        begun = _log_sum(self.log_s, math.log(seconds))
        self.log_s = begun + count * self._ratio_log - self._slope * seconds


def _log_sum(a: float, b: float) -> float:
    """ln(e^a + e^b)."""
    most, least = max(a, b), min(a, b)
    return most + math.log1p(math.exp(least - most))
