"""How far rooflines were off beside published throughputs: facts, by device and tensor-parallel degree."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Compared:
    """What the rows of one device and degree came to that no constant was fitted to."""

    device: str
    tp: int
    rows: int
    median_error: float
    """Median of |predicted - published| / published output tokens/s."""
    beyond_quarter: float
    """Share of the rows that were off by more than a quarter."""


SOURCE = "TensorRT-LLM"
"""Whose throughputs: perf-overview.md of versions 0.14 to 1.2 in its repository (Apache-2.0), dense models in 16 and 8
bits at maximum load, beside the roofline under engine `tensorrt-llm`: `python -m benchmarks.published --facts`."""
COMPARED: tuple[Compared, ...] = ()
