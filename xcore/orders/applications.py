"""First come, first served by application (Parrot): all requests of an application before those of any later one."""

from xcore.batching import Sequence


class FirstApplication:
    """Orders requests by their application's arrival, then by their own arrival."""

    changes = False

    def key(self, sequence: Sequence, now: float) -> tuple[float, str, str, float, int]:
        """Return the sorting key, a constant."""
        hints = sequence.hints
        return hints.application_arrival_s, hints.application or "", hints.run or "", sequence.arrival_s, sequence.index
