"""First come, first served."""

from typing import Protocol


class Waiting(Protocol):
    """What an order may look at."""

    index: int
    arrival_s: float


def fcfs(sequence: Waiting) -> tuple[float, int]:
    """By arrival; requests of the same moment in the order in which they were given."""
    return sequence.arrival_s, sequence.index
