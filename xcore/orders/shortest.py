"""Shortest job first, and shortest remaining time first, with known output lengths."""

from math import inf

from xcore.batching import Sequence
from xcore.orders.remaining import remaining_tokens


class SJF:
    """Orders requests by the length of the whole output."""

    changes = False

    def key(self, sequence: Sequence, now: float) -> tuple[int, float, int]:
        """Return the sorting key, a constant."""
        return sequence.hints.output_tokens or 0, sequence.arrival_s, sequence.index

    def steady_s(self, sequence: Sequence, now: float) -> float:
        """Return how long the key of a running sequence won't rise: it is constant."""
        return inf


class SRTF:
    """Orders sequences by remaining output tokens, also after a preemption."""

    changes = False

    def key(self, sequence: Sequence, now: float) -> tuple[int, float, int]:
        """Return the sorting key, constant while a sequence waits."""
        return remaining_tokens(sequence), sequence.arrival_s, sequence.index
