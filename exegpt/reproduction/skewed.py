"""A truncated skew normal distribution of lengths, with fixed moments and a variable skewness (section 7.6)."""

import math

import numpy as np

from xcore.arrays import Array
from xcore.errors import InputError
from xcore.specs.workload import LengthDistribution


def skewed_normal(mean: float, std: float, most: int, skewness: float = 0.0) -> LengthDistribution:
    """Return a skew normal truncated to (0, most], in whole tokens: P(s) is its weight in (s-1, s].

    `skewness`, within ±0.99, is that of the distribution before truncation. Location and scale are fitted so that the
    discrete distribution has this mean and deviation. With skewness 0 this is the truncated normal. Raises InputError
    if no such distribution has these moments.
    """
    from scipy.optimize import least_squares
    from scipy.special import ndtr, owens_t

    shape, lengths = _shape(skewness), np.arange(1, most + 1)

    def probabilities(at: Array) -> Array:
        edges = (np.arange(most + 1) - at[0]) / math.exp(at[1])
        below = ndtr(edges) - 2 * owens_t(edges, shape)  # the skew normal's cumulative distribution
        weights: Array = np.maximum(np.diff(below), 0.0)  # rounding, far out in a tail
        return weights / max(float(weights.sum()), 1e-300)

    def miss(at: Array) -> Array:
        p = probabilities(at)
        moment = lengths @ p
        return np.array([moment - mean, math.sqrt(max(float(lengths**2 @ p - moment**2), 0.0)) - std])

    reach = math.log(20.0 * most)
    limits = ([-20.0 * most, 0.0], [20.0 * most, reach])
    fit = least_squares(miss, [mean, math.log(std)], bounds=limits, xtol=1e-14, ftol=1e-14, gtol=1e-14)
    if np.abs(fit.fun).max() > 1e-3:
        raise InputError(
            f"No skew normal up to {most} tokens has skewness {skewness:g}, mean {mean:g} and deviation {std:g}: "
            "ask for a smaller deviation or a greater maximum."
        )
    p = probabilities(fit.x)
    keep = p > 1e-15
    return LengthDistribution(tuple(lengths[keep].tolist()), tuple((p[keep] / p[keep].sum()).tolist()))


def _shape(skewness: float) -> float:
    """Return the skew normal's shape parameter for a skewness."""
    third = abs(skewness) ** (2 / 3)
    delta = math.copysign(math.sqrt(math.pi / 2 * third / (third + ((4 - math.pi) / 2) ** (2 / 3))), skewness)
    return delta / math.sqrt(1 - delta**2)
