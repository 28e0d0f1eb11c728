"""What plots of throughput over latency draw for each policy."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Series:
    """One policy's points (latency in seconds, output tokens/s), and its measured one where it was run."""

    name: str
    points: tuple[tuple[float, float], ...]
    mark: str
    """A letter on a terminal's plot."""
    colour: str
    measured: tuple[float, float] | None = None
