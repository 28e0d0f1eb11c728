"""The iterations that give outputs of varying lengths, if an iteration may give several tokens."""

import numpy as np

from xcore.arrays import Array
from xcore.specs.speculation import EXACT, Speculation
from xcore.specs.workload import LengthDistribution
from xsimulator.steady.prompts import even_normal

SHORT_OUTPUT = EXACT + 1
"""Longest output, in tokens, whose iterations are known exactly."""
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


def points_of(lengths: Array, speculation: Speculation, count: int) -> Array:
    """Return `count` equally likely numbers of iterations that give outputs of these lengths, [count, lengths].

    They are quantiles of the exact distribution of short outputs, and of a normal distribution beyond them.
    """
    after, exact = lengths - 1.0, speculation.unfinished
    shares = (np.arange(count) + 0.5) / count
    mean, deviation = speculation.iterations(after)
    points: Array = 1.0 + mean + (even_normal(count) / even_normal(count).std())[:, None] * deviation
    short = after < exact.shape[1] - 0.5
    if short.any():
        left = exact[:, np.rint(after[short]).astype(np.intp)]
        points[:, short] = 1.0 + (left > 1.0 - shares[:, None, None]).sum(axis=1)
    return points


def outputs_given(steps: Array, outputs: LengthDistribution, speculation: Speculation) -> Array:
    """Return outputs, in tokens, that take these numbers of iterations; none exceeds `SHORT_OUTPUT`.

    The outputs with the same number of iterations are spread evenly over their distribution.
    """
    left = speculation.unfinished[:, outputs.s.astype(np.intp) - 1]
    chances = -np.diff(left, axis=0, prepend=1.0) * outputs.p  # P(D = n and this length)
    tokens, rng = np.empty(len(steps)), np.random.default_rng(2)
    for number in np.unique(steps):
        places = np.flatnonzero(steps == number)
        reached = np.cumsum(chances[int(number) - 1])
        shares = (rng.permutation(len(places)) + 0.5) / len(places) * reached[-1]
        tokens[places] = outputs.s[np.minimum(np.searchsorted(reached, shares), len(outputs.s) - 1)]
    return tokens


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
