"""First come, first served."""

from exegpt.batching import Sequence


class FCFS:
    """By arrival; requests of the same moment in the order in which they were given."""

    changes = False

    def key(self, sequence: Sequence, now: float) -> tuple[float, int]:
        """A constant."""
        return sequence.arrival_s, sequence.index


fcfs = FCFS()
