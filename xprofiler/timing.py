"""Timing one call: warm-up, repeats, median and spread."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Timing:
    """Median wall seconds of a call, and the interquartile range as a share of it."""

    seconds: float
    spread: float


def timed(call: Callable[[], object], budget_s: float = 0.03, least: int = 3, most: int = 20) -> Timing:
    """Time `call` after one warm-up, `least` to `most` times, as many as fit into `budget_s` seconds."""
    call()
    times: list[float] = []
    while len(times) < least or (sum(times) < budget_s and len(times) < most):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    low, median, high = np.percentile(times, [25, 50, 75])
    return Timing(float(median), float((high - low) / median) if median else 0.0)
