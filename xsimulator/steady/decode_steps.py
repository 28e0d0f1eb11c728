"""The iterations that give outputs of varying lengths, if an iteration may give several tokens."""

import numpy as np
from numpy.typing import NDArray

from xcore.specs.speculation import Speculation
from xcore.specs.workload import LengthDistribution
from xsimulator.steady.prompts import even_normal

Array = NDArray[np.float64]

_POINTS = 32
"""Points that stand for the normal distribution of the iterations of a long output."""
_LEAST = 1e-9
"""Probability below which the most iterations are left out: no request in a million has them."""


def in_steps(outputs: LengthDistribution, speculation: Speculation) -> LengthDistribution:
    """Return the distribution of the iterations that give an output: one is its prefill, the others decode.

    It is exact for short outputs. Long ones have the exact mean and deviation.
    """
    after, exact = outputs.s - 1.0, speculation.unfinished
    short = after < exact.shape[1]
    chances = np.zeros(1)
    if short.any():
        left = exact[:, after[short].astype(np.intp)] @ outputs.p[short]  # P(D > n), n = 0, 1, ...
        chances = -np.diff(left, prepend=outputs.p[short].sum(), append=0.0)
    if not short.all():
        chances = _added(chances, _long(after[~short], outputs.p[~short], speculation))
    chances[chances < _LEAST] = 0.0
    steps = np.flatnonzero(chances)
    return LengthDistribution(tuple((1 + steps).tolist()), tuple((chances[steps] / chances.sum()).tolist()))


def _long(tokens: Array, p: Array, speculation: Speculation) -> Array:
    """Return the probability of each number of iterations from 0, by points of a normal distribution."""
    points = even_normal(_POINTS)
    points = points / points.std()
    mean, deviation = (figure[:, None] for figure in speculation.iterations(tokens))
    steps = np.maximum(mean + deviation * points, 1.0)
    below = np.floor(steps)
    weight = np.broadcast_to(p[:, None] / _POINTS, steps.shape)
    places = np.concatenate([below.ravel(), below.ravel() + 1.0]).astype(np.intp)
    shares = np.concatenate([(weight * (1.0 - (steps - below))).ravel(), (weight * (steps - below)).ravel()])
    return np.bincount(places, weights=shares).astype(np.float64)


def _added(a: Array, b: Array) -> Array:
    total = np.zeros(max(len(a), len(b)))
    total[: len(a)] += a
    total[: len(b)] += b
    return total
