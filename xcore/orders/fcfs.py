"""First come, first served."""

from math import inf

from xcore.batching import Sequence


class FCFS:
    """Orders sequences by arrival; simultaneous requests keep the given order."""

    changes = False
    by_arrival = True
    """Whether a policy may exchange neighbours for batches of even work (`Queue.by_arrival`)."""

    def key(self, sequence: Sequence, now: float) -> tuple[float, int]:
        """Return the sorting key, a constant."""
        return sequence.arrival_s, sequence.index

    def steady_s(self, sequence: Sequence, now: float) -> float:
        """Return how long the key of a running sequence won't rise: it is constant."""
        return inf


fcfs = FCFS()
