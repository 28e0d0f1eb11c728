"""The Gittins order: unknown demands, the lowest expected cost per completion first.

For demands X of which only a distribution is known, the Gittins policy minimises the mean completion time (Hermes,
Eq. 1).
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from collections.abc import Sequence as Samples
from itertools import accumulate
from typing import Generic, Protocol, TypeVar

BUCKETS = 10
"""Buckets of equal width over a demand's samples: a rank is recomputed when attained service enters the next one."""


def gittins_rank(samples: Samples[float], attained: float) -> float:
    """Return G(a) = inf over budgets D of E[min(X - a, D) | X > a] / P(X - a <= D | X > a), exact on samples of X.

    `samples` are ascending, in any unit of service, which is the rank's unit too; lower is earlier. The infimum is
    reached at a residual d_k of the n samples above `attained`, where it is (d_1 + … + d_k + (n - k) d_k) / k. Above
    all samples, the last one is doubled until it exceeds `attained`. With a rank of 0, a job without end would always
    be first.
    """
    first = bisect_right(samples, attained)
    if first == len(samples):
        return _beyond(samples[-1], attained)
    residuals = [x - attained for x in samples[first:]]
    n = len(residuals)
    spent = accumulate(residuals)
    return min((p + (n - k) * d) / k for k, (d, p) in enumerate(zip(residuals, spent, strict=True), 1))


def _beyond(last: float, attained: float) -> float:
    """Return the residual to the last sample, doubled until it exceeds `attained`; never 0."""
    if attained <= 0:
        return 0.0  # no demand
    if last <= 0:
        last = attained
    doublings = math.floor(math.log2(attained / last)) + 1
    bound = last * 2.0**doublings
    return (bound if bound > attained else 2 * bound) - attained


class RankedDemand:
    """A demand's samples with its Gittins rank, which is constant within a bucket."""

    def __init__(self, samples: Samples[float], buckets: int = BUCKETS):
        """Rank at least one sample, none negative, in any order; `buckets` have equal width from 0 to the greatest."""
        self.samples = sorted(samples)
        self.mean = math.fsum(self.samples) / len(self.samples)
        self._buckets = buckets
        self._ranks: dict[int, float] = {}
        """Ranks by bucket, computed at its lower boundary."""

    @property
    def most(self) -> float:
        """Return the greatest sample: sup X."""
        return self.samples[-1]

    def next_sample(self, attained: float) -> float:
        """Return the smallest sample above `attained`; if there is none, the greatest sample."""
        return self.samples[min(bisect_right(self.samples, attained), len(self.samples) - 1)]

    def rank(self, attained: float) -> float:
        """Return the Gittins rank at the lower boundary of `attained`'s bucket; beyond all samples, at `attained`."""
        if attained >= self.most:
            return gittins_rank(self.samples, attained)
        bucket = int(attained / self.most * self._buckets)
        if bucket not in self._ranks:
            self._ranks[bucket] = gittins_rank(self.samples, bucket * self.most / self._buckets)
        return self._ranks[bucket]


class WaitingJob(Protocol):
    """A waiting job: a sequence, or an application's call."""

    @property
    def arrival_s(self) -> float:
        """Return the job's arrival."""

    @property
    def index(self) -> int:
        """Return the job's unique index in the run."""


J = TypeVar("J", bound=WaitingJob)


class Gittins(Generic[J]):
    """Orders jobs by the Gittins rank of their demands; equal ranks by arrival."""

    changes = True

    def __init__(self, demand: Callable[[J], RankedDemand], attained: Callable[[J], float]):
        """Rank jobs by `demand` and `attained` service, in the same unit.

        Both refer to the whole application of a job.
        """
        self._demand = demand
        self._attained = attained

    def key(self, job: J, now: float) -> tuple[float, float, int]:
        """Return the sorting key, which changes only when attained service enters another bucket."""
        return self._demand(job).rank(self._attained(job)), job.arrival_s, job.index
