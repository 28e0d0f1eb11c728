"""SeaLLM's adaptive replacement: the more accurate a placement's simulation was, the longer the placement stays."""

from dataclasses import dataclass

BETA = 0.1
FIRST_S = 300.0
SHORTEST_S, LONGEST_S = 30.0, 3600.0
LEAST = 0.01
"""Smaller estimates count as this one: otherwise the relative error of a share near 0 would be unbounded."""


@dataclass(frozen=True)
class Performance:
    """The performance of a placement, simulated or measured."""

    in_time: float
    """Share of requests within their bounds."""
    normalised: float
    """Mean of latency over L̂."""

    def error(self, real: "Performance") -> float:
        """Return the larger relative error of the two figures; this is the estimate."""
        pairs = ((self.in_time, real.in_time), (self.normalised, real.normalised))
        return max(abs(came - estimated) / max(LEAST, estimated) for estimated, came in pairs)


def next_interval(seconds: float, error: float, beta: float = BETA) -> float:
    """Return the interval after one of `seconds`, within limits.

    The interval is a tenth shorter if the error exceeds β, else a tenth longer.
    """
    changed = seconds * (1 - beta if error > beta else 1 + beta)
    return min(LONGEST_S, max(SHORTEST_S, changed))
