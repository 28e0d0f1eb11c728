"""Shortest job first, and shortest remaining time first, by output lengths that are known."""

from exegpt.batching import Sequence
from exegpt.orders.remaining import remaining_tokens


class SJF:
    """By the length of the whole output."""

    changes = False

    def key(self, sequence: Sequence, now: float) -> tuple[int, float, int]:
        """A constant."""
        return sequence.hints.output_tokens or 0, sequence.arrival_s, sequence.index


class SRTF:
    """By the tokens that are left: a preempted sequence comes as early as its rest is short."""

    changes = False

    def key(self, sequence: Sequence, now: float) -> tuple[int, float, int]:
        """Constant while it waits."""
        return remaining_tokens(sequence), sequence.arrival_s, sequence.index
