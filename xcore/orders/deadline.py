"""Earliest deadline first."""

from math import inf

from xcore.batching import Sequence


class EDF:
    """Orders sequences by deadline; those without a deadline come last, by arrival."""

    changes = False

    def key(self, sequence: Sequence, now: float) -> tuple[float, float, int]:
        """Return the sorting key, a constant."""
        deadline_s = sequence.hints.deadline_s
        return inf if deadline_s is None else deadline_s, sequence.arrival_s, sequence.index
