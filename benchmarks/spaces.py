"""Random search spaces whose optimum an exhaustive search can find: monotone by construction, or nearly so."""

import numpy as np

from xcore.arrays import Array
from xscheduler.space import Constraint, Evaluation, Space, Variable

SMALL, LARGE = (100, 1_000), (1_000, 20_000)
"""Fewest and most points of a space."""


def _shape(rng: np.random.Generator, points: tuple[int, int]) -> tuple[int, ...]:
    while True:
        sides = int(rng.integers(2, 4))
        shape = tuple(int(n) for n in rng.integers(3, 201 if sides == 2 else 40, size=sides))
        if points[0] <= np.prod(shape) <= points[1]:
            return shape


def _rising(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Values that rise, or stay, along every axis: sums over boxes of random jumps, plus a curve along each axis."""
    rough: Array = rng.exponential(size=shape) * (rng.random(shape) < rng.uniform(0.2, 1.0))
    for axis in range(len(shape)):
        rough = np.cumsum(rough, axis=axis)
    values = rough / rough.max()
    for axis, n in enumerate(shape):
        curve = np.cumsum(rng.exponential(size=n) ** rng.uniform(0.5, 3.0))
        values = values + rng.uniform(0.0, 2.0) * np.expand_dims(
            curve / curve[-1], [a for a in range(len(shape)) if a != axis]
        )
    bent: Array = values ** rng.uniform(0.3, 3.0)
    return bent


def random_space(seed: int, points: tuple[int, int], noise: float = 0.0, opposed: bool = False) -> Space:
    """A space of two or three variables in which throughput and latency rise, but for `noise` (the share by which each
    value is off at most).

    The bound lies anywhere in the latencies' range. With `opposed`, a second figure falls along the last variable,
    as the wait for a phase's end does, and has a bound of its own.
    """
    rng = np.random.default_rng(seed)
    shape = _shape(rng, points)
    throughput, latency, other = (_rising(rng, shape) for _ in range(3))
    throughput, latency = (a * (1 + noise * rng.uniform(-1, 1, size=shape)) for a in (throughput + 1e-6, latency))
    figures = [latency, np.flip(other, axis=-1)] if opposed else [latency]
    up = (True,) * len(shape)
    constraints = [
        Constraint(name, float(np.quantile(values, rng.uniform(0.02, 0.98))), rises)
        for name, values, rises in zip(("latency", "wait"), figures, (up, (*up[:-1], False)), strict=False)
    ]
    return Space(
        f"random-{seed}",
        tuple(Variable(f"x{axis}", tuple(range(n))) for axis, n in enumerate(shape)),
        tuple(constraints),
        lambda at: Evaluation(float(throughput[at]), tuple(float(values[at]) for values in figures)),
    )
