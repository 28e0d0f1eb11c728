"""Least slack first: who must start soonest to be in time."""

from math import inf

from exegpt.batching import Sequence
from exegpt.orders.remaining import remaining_s


class LeastSlack:
    """By slack: deadline - now - remaining time alone. Those without a deadline come last, by arrival.

    The slack of all that wait falls alike, so that their order needs no `now`: the key is the latest start.
    """

    changes = False

    def key(self, sequence: Sequence, now: float) -> tuple[float, float, int]:
        """Constant while it waits: the moment of its latest start."""
        deadline_s = sequence.hints.deadline_s
        latest = inf if deadline_s is None else deadline_s - remaining_s(sequence)
        return latest, sequence.arrival_s, sequence.index
