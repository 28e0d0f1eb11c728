"""SeaLLM's adaptive replacement: how long a placement stays, by how well its simulation foretold what came."""

from dataclasses import dataclass

BETA = 0.1
FIRST_S = 300.0
SHORTEST_S, LONGEST_S = 30.0, 3600.0
LEAST = 0.01
"""Estimates below it count as it: else the error of a share near 0 is endless."""


@dataclass(frozen=True)
class Performance:
    """What a simulation estimates, or what came."""

    in_time: float
    """Share of requests within their bounds."""
    normalised: float
    """Mean of latency over L̂."""

    def error(self, real: "Performance") -> float:
        """The larger relative error of the two, this being the estimate."""
        pairs = ((self.in_time, real.in_time), (self.normalised, real.normalised))
        return max(abs(came - estimated) / max(LEAST, estimated) for estimated, came in pairs)


def next_interval(seconds: float, error: float, beta: float = BETA) -> float:
    """How long the next placement stays after one that stayed for `seconds`: a tenth less where the error exceeds β,
    else a tenth more, within bounds.
    """
    changed = seconds * (1 - beta if error > beta else 1 + beta)
    return min(LONGEST_S, max(SHORTEST_S, changed))
