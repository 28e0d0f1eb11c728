"""SeaLLM's T'·L̂: the best order for latencies relative to each service's own."""

from math import inf

from xcore.batching import Sequence
from xcore.orders.remaining import remaining_s


class Product:
    """Orders requests by remaining time alone times the service's mean time alone.

    A normalised latency weighs a request by 1/L̂, so Smith's ratio of time to weight is this product.
    """

    changes = False

    def key(self, sequence: Sequence, now: float) -> tuple[float, float, int]:
        """Return the sorting key, constant while a sequence waits, in seconds squared."""
        hints = sequence.hints
        return remaining_s(sequence) * (hints.service_time_s or 0.0), sequence.arrival_s, sequence.index

    def steady_s(self, sequence: Sequence, now: float) -> float:
        """Return how long the key of a running sequence won't rise: it only falls."""
        return inf
