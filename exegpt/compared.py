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
COMPARED = (
    Compared("A100-80GB", 1, 18, 0.054, 0.0),
    Compared("A100-80GB", 2, 7, 0.11, 0.0),
    Compared("A100-80GB", 4, 8, 0.104, 0.125),
    Compared("A100-80GB", 8, 9, 0.107, 0.222),
    Compared("H100-SXM", 1, 51, 0.047, 0.059),
    Compared("H100-SXM", 2, 26, 0.047, 0.0),
    Compared("H100-SXM", 4, 21, 0.065, 0.095),
    Compared("H100-SXM", 8, 29, 0.089, 0.103),
    Compared("H200-SXM", 1, 53, 0.034, 0.019),
    Compared("H200-SXM", 2, 13, 0.049, 0.0),
    Compared("H200-SXM", 4, 17, 0.061, 0.059),
    Compared("H200-SXM", 8, 36, 0.058, 0.028),
    Compared("L40S", 1, 19, 0.074, 0.0),
    Compared("L40S", 4, 11, 0.029, 0.0),
    Compared("L40S", 8, 7, 0.136, 0.286),
)
