"""Shortest job first, and shortest remaining time first, with known output lengths."""

from xcore.batching import Sequence
from xcore.orders.remaining import remaining_tokens


class SJF:
    """By the length of the whole output."""

    changes = False

    def key(self, sequence: Sequence, now: float) -> tuple[int, float, int]:
        """Return the sorting key, a constant."""
        return sequence.hints.output_tokens or 0, sequence.arrival_s, sequence.index


class SRTF:
    """By remaining tokens: a preempted sequence is ranked by its remainder."""

    changes = False

    def key(self, sequence: Sequence, now: float) -> tuple[int, float, int]:
        """Return the sorting key, constant while a sequence waits."""
        return remaining_tokens(sequence), sequence.arrival_s, sequence.index
