"""ArrivalRate: the recent arrival rate of sequences."""

import math


class ArrivalRate:
    """The rate of sequences per second, accepted or not: an exponential mean with a memory in seconds."""

    def __init__(self, memory_s: float):
        self._memory_s, self._rate, self._at_s = memory_s, 0.0, 0.0

    def come(self, count: int, now_s: float) -> None:
        """Count arrivals."""
        self._rate, self._at_s = self.rate(now_s) + count / self._memory_s, now_s

    def rate(self, now_s: float) -> float:
        """Return the recent rate."""
        return self._rate * math.exp((self._at_s - now_s) / self._memory_s)
