"""Simulated scores of a ranker: true lengths with as much noise as a given Kendall's tau leaves."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from xcore.errors import InputError

_STEPS = 40
"""Steps of the bisection: far finer than a sample of requests can distinguish."""


def kendall_tau(scores: Sequence[float] | NDArray[np.float64], lengths: Sequence[int] | NDArray[np.int64]) -> float:
    """Return Kendall's tau-b of scores (high: short) and lengths: 1 if all are in order, 0 if either is constant."""
    from scipy.stats import kendalltau

    tau = float(kendalltau(-np.asarray(scores, dtype=np.float64), np.asarray(lengths)).statistic)
    return 0.0 if math.isnan(tau) else tau


def noisy_scores(lengths: Sequence[int], tau: float, seed: int) -> NDArray[np.float64]:
    """Return scores -(log length + sigma * noise) [n] whose tau with the lengths is `tau`, by bisection over sigma.

    Raises InputError for a tau that isn't above 0 and at most 1.
    """
    if not 0.0 < tau <= 1.0:
        raise InputError(f"The ranker's tau is {tau:g}, but it must be above 0 and at most 1.")
    logs = np.log(np.asarray(lengths, dtype=np.float64))
    noise = np.random.default_rng(seed).standard_normal(len(logs))
    low, high = 0.0, 1.0
    if tau == 1.0 or len(set(lengths)) < 2:
        return -logs
    while kendall_tau(-(logs + high * noise), np.asarray(lengths)) > tau and high < 1e6:
        high *= 2
    for _ in range(_STEPS):
        sigma = (low + high) / 2
        above = kendall_tau(-(logs + sigma * noise), np.asarray(lengths)) > tau
        low, high = (sigma, high) if above else (low, sigma)
    result: NDArray[np.float64] = -(logs + high * noise)
    return result
