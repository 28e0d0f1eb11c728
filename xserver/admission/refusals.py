"""Refusals: the recent ones, which answer at once for every request that asks for as much or more."""

import random
from dataclasses import dataclass
from math import ceil, inf

from xserver.http.api_error import RATE_LIMIT, ApiError

_VALID_S = 0.05
"""Seconds for which a refusal holds if nothing else changes: a later request may be answered later."""
_LEAST_S = 0.01
"""Seconds for which a refusal holds whatever changes: a fast engine sends hundreds of messages per second."""


@dataclass(frozen=True)
class Demand:
    """The demand of a request: all that admission depends on."""

    sequences: int
    tokens: int
    """Output tokens that 99 of 100 such sequences stay below."""
    long: bool
    """Whether a prompt is longer than the schedule's workload."""
    less_s: float = 0.0
    """Seconds that cached tokens take off each prefill: at most, of a request; at least, of a refusal."""

    def exceeds(self, other: "Demand") -> bool:
        """Return whether this is at least as much as another demand of the same kind."""
        more = self.sequences >= other.sequences and self.tokens >= other.tokens and self.less_s <= other.less_s
        return more and self.long == other.long


@dataclass(frozen=True)
class Refusal:
    """Why a demand was refused, and for how long there is probably no room."""

    demand: Demand
    code: str
    why: str
    until_s: float
    """When there may be room for one such request, by the monotonic clock."""
    further_s: float
    """When there may be room for more of them."""
    per_s: float
    """Sequences per second that the engine ends at its present load."""
    made_s: float

    def error(self, after_s: float) -> ApiError:
        """Return the error 429 with the time after which such a request would be accepted.

        The time is randomly spread, so that clients don't return together.
        """
        after_s = max(0.05, after_s) * random.uniform(1.0, 1.4)
        headers = {"Retry-After": str(ceil(after_s)), "retry-after-ms": str(ceil(1000 * after_s))}
        return ApiError(429, self.why, self.code, None, RATE_LIMIT, headers)


class RecentRefusals:
    """The refusals since the engine's last message, and those of the last moment."""

    def __init__(self) -> None:
        self._refusals: list[Refusal] = []
        self._changed_s = -inf
        """When the engine's state last changed."""

    def add(self, refusal: Refusal) -> None:
        """Add a refusal, and remove those of larger demands."""
        self._refusals = [old for old in self._refusals if not old.demand.exceeds(refusal.demand)] + [refusal]

    def find(self, demand: Demand, now_s: float) -> Refusal | None:
        """Return the refusal of a demand that doesn't exceed this one; None if there is none."""
        for old in self._refusals:
            holds_s = _LEAST_S if old.made_s <= self._changed_s else _VALID_S
            if now_s - old.made_s <= holds_s and demand.exceeds(old.demand):
                return old
        return None

    def clear(self, now_s: float) -> None:
        """Drop all but the latest refusals, because the engine's state has changed."""
        self._refusals = [refusal for refusal in self._refusals if now_s - refusal.made_s <= _LEAST_S]
        self._changed_s = now_s
