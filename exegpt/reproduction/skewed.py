"""The skew normal law of lengths, truncated, whose moments are held while its skewness is changed (section 7.6)."""

import math

import numpy as np
from numpy.typing import NDArray

from exegpt.errors import InputError
from exegpt.workload import LengthDistribution

Array = NDArray[np.float64]


def skewed_normal(mean: float, std: float, most: int, skewness: float = 0.0) -> LengthDistribution:
    """A skew normal truncated to (0, most], in whole tokens: P(s) is its weight in (s-1, s].

    `skewness` is the parent's, within ±0.99; its place and scale are fitted so that the discrete law has the asked mean
    and deviation. At 0 it is the truncated normal. Raises InputError where no such law has these moments.
    """
    from scipy.optimize import least_squares
    from scipy.special import ndtr, owens_t

    shape, lengths = _shape(skewness), np.arange(1, most + 1)

    def law(at: Array) -> Array:
        edges = (np.arange(most + 1) - at[0]) / math.exp(at[1])
        below = ndtr(edges) - 2 * owens_t(edges, shape)  # the skew normal's cumulative law
        weights: Array = np.maximum(np.diff(below), 0.0)  # rounding, far out in a tail
        return weights / max(float(weights.sum()), 1e-300)

    def miss(at: Array) -> Array:
        p = law(at)
        found = lengths @ p
        return np.array([found - mean, math.sqrt(max(float(lengths**2 @ p - found**2), 0.0)) - std])

    reach = math.log(20.0 * most)
    limits = ([-20.0 * most, 0.0], [20.0 * most, reach])
    found = least_squares(miss, [mean, math.log(std)], bounds=limits, xtol=1e-14, ftol=1e-14, gtol=1e-14)
    if np.abs(found.fun).max() > 1e-3:
        raise InputError(
            f"No skew normal law up to {most} tokens has skewness {skewness:g}, mean {mean:g} and deviation {std:g}: "
            "ask for a smaller deviation or a greater maximum."
        )
    p = law(found.x)
    keep = p > 1e-15
    return LengthDistribution(tuple(lengths[keep].tolist()), tuple((p[keep] / p[keep].sum()).tolist()))


def _shape(skewness: float) -> float:
    """The skew normal's shape parameter for a skewness."""
    third = abs(skewness) ** (2 / 3)
    delta = math.copysign(math.sqrt(math.pi / 2 * third / (third + ((4 - math.pi) / 2) ** (2 / 3))), skewness)
    return delta / math.sqrt(1 - delta**2)
