"""Least slack first: the request that must start soonest to be in time."""

from math import inf

from xcore.batching import Sequence
from xcore.orders.remaining import remaining_s


class LeastSlack:
    """Orders requests by slack: deadline - now - remaining time alone.

    Requests without a deadline come last, by arrival. The slack of all waiting requests falls at the same speed, so
    their order needs no `now`: the key is the latest start time.
    """

    changes = False

    def key(self, sequence: Sequence, now: float) -> tuple[float, float, int]:
        """Return the sorting key, constant while a sequence waits: its latest start time."""
        deadline_s = sequence.hints.deadline_s
        latest = inf if deadline_s is None else deadline_s - remaining_s(sequence)
        return latest, sequence.arrival_s, sequence.index
