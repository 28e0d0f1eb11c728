"""Arrival times of requests: at random, in bursts, or as in a trace."""

import math
from collections.abc import Sequence

import numpy as np

from xcore.arrays import Array
from xcore.errors import InputError
from xcore.traces.trace import parse_rate

KINDS = ("poisson", "burst", "trace")
BURSTINESS = 0.25
"""Default burstiness of `burst`: gaps whose standard deviation is twice their mean."""
_BATCH = 4096


def parse_rates(text: str) -> tuple[float, ...]:
    """Parse rates in requests per second, like `5/s,10/s,inf`; `inf` is all at once."""
    return tuple(math.inf if rate.strip() == "inf" else parse_rate(rate) for rate in text.split(","))


def random_arrivals(rate: float, num: int, seed: Sequence[int], burstiness: float = 1.0) -> Array:
    """Draw the arrivals of `num` requests in seconds [num], the first at 0.

    Gaps have the mean 1/rate and a Gamma distribution of the shape `burstiness`, as in `vllm bench serve`. 1 is a
    Poisson process; the gaps' coefficient of variation is 1/sqrt(burstiness); `inf` spaces requests evenly.
    """
    if math.isinf(rate):
        return np.zeros(num)
    if math.isinf(burstiness):
        return np.arange(num) / rate
    gaps = np.random.default_rng(seed).gamma(burstiness, 1.0 / (rate * burstiness), size=num)
    arrivals: Array = np.cumsum(gaps) - gaps[:1]
    return arrivals


def random_arrivals_until(
    end_s: float, rate: float, seed: Sequence[int], burstiness: float = 1.0, most: int = 10_000_000
) -> Array:
    """Draw `random_arrivals` of the requests that arrive before `end_s`; InputError for more than `most`."""
    if rate * end_s > most:
        raise InputError(
            f"{rate:g} requests per second for {end_s:g} s are more than {most:,} requests: shorten --duration."
        )
    num = int(rate * end_s) + _BATCH
    while True:
        arrivals = random_arrivals(rate, num, seed, burstiness)
        if arrivals[-1] >= end_s:
            return arrivals[arrivals < end_s]
        num *= 2


def trace_arrivals(seconds: Sequence[float], rate: float | None) -> Array:
    """Sort a trace's arrivals and make them relative to the first; with `rate`, stretch them to this mean rate.

    Raises:
        InputError: The trace has no two different arrivals.
    """
    arrivals: Array = np.sort(np.asarray(seconds, dtype=np.float64))
    arrivals = arrivals - arrivals[0]
    if not arrivals[-1] > 0:
        raise InputError("The trace has no arrivals: name their column with --columns arrival=NAME, or pass a --rate.")
    return arrivals if rate is None else arrivals * ((len(arrivals) - 1) / rate / arrivals[-1])
