"""The series of each policy in plots of throughput over latency."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Series:
    """One policy's points (latency in seconds, output tokens/s), and its measured point if it was run."""

    name: str
    points: tuple[tuple[float, float], ...]
    mark: str
    """A letter on a terminal's plot."""
    colour: str
    measured: tuple[float, float] | None = None
