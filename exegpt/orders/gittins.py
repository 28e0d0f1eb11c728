"""The Gittins order: unknown demands, the lowest expected cost per completion first.

For demands X of which only a distribution is known, the Gittins policy minimises the mean completion time (Hermes, Eq. 1).
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from collections.abc import Sequence as Samples
from itertools import accumulate

from exegpt.batching import Sequence

BUCKETS = 10
"""Of equal width over a demand's samples: ranks are computed again only where attained service enters the next one."""


def gittins_rank(samples: Samples[float], attained: float) -> float:
    """G(a) = inf over budgets D of E[min(X - a, D) | X > a] / P(X - a <= D | X > a), exactly, on samples of X.

    `samples` rise, in any unit of service, which the rank has too; lower is earlier. The infimum is reached at a residual
    d_k of the n samples above `attained`, where it is (d_1 + … + d_k + (n - k) d_k) / k. Above all samples the last one is
    doubled until it lies beyond: with 0 a job without end would be the first for ever.
    """
    first = bisect_right(samples, attained)
    if first == len(samples):
        return _beyond(samples[-1], attained)
    residuals = [x - attained for x in samples[first:]]
    n = len(residuals)
    spent = accumulate(residuals)
    return min((p + (n - k) * d) / k for k, (d, p) in enumerate(zip(residuals, spent, strict=True), 1))


def _beyond(last: float, attained: float) -> float:
    """The residual to the last sample, doubled until it is above `attained`; never 0."""
    if attained <= 0:
        return 0.0  # a demand of nothing
    if last <= 0:
        last = attained
    doublings = math.floor(math.log2(attained / last)) + 1
    bound = last * 2.0**doublings
    return (bound if bound > attained else 2 * bound) - attained


class RankedDemand:
    """A demand's samples with its Gittins rank, which stays as it is within a bucket."""

    def __init__(self, samples: Samples[float], buckets: int = BUCKETS):
        """`samples` in any order, at least one; `buckets` of equal width between the least and the greatest."""
        self.samples = sorted(samples)
        self._low = self.samples[0]
        self._width = (self.samples[-1] - self._low) / buckets
        self._bucket = -2
        self._rank = math.inf

    @property
    def most(self) -> float:
        """The greatest sample: sup X."""
        return self.samples[-1]

    @property
    def mean(self) -> float:
        """E[X]."""
        return math.fsum(self.samples) / len(self.samples)

    def rank(self, attained: float) -> float:
        """The Gittins rank as of when `attained` entered its bucket."""
        bucket = math.floor((attained - self._low) / self._width) if self._width else int(attained >= self._low)
        bucket = max(bucket, -1)
        if bucket != self._bucket:
            self._bucket = bucket
            self._rank = gittins_rank(self.samples, attained)
        return self._rank


class Gittins:
    """By the Gittins rank of what each sequence demands; equal ranks by arrival."""

    changes = True

    def __init__(self, demand: Callable[[Sequence], RankedDemand], attained: Callable[[Sequence], float]):
        """`demand` and `attained` of a sequence, in the same unit of service: that of all that it belongs to."""
        self._demand = demand
        self._attained = attained

    def key(self, sequence: Sequence, now: float) -> tuple[float, float, int]:
        """Changes only where attained service enters another bucket."""
        return self._demand(sequence).rank(self._attained(sequence)), sequence.arrival_s, sequence.index
