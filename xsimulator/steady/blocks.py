"""KV blocks that resident queries hold: their distribution by three moments (docs/theory.md)."""

import math
from dataclasses import dataclass

import numpy as np

from xcore.arrays import Array
from xcore.specs.schedule import BLOCK_SIZE
from xcore.specs.workload import Workload
from xsimulator.steady.residents import Z999, cornish_fisher, decode_iterations_of


@dataclass(frozen=True)
class Reservation:
    """Blocks that residents hold: moments per query, and the most that one query holds.

    Moments of independent residents add up (`+`).
    """

    mean: float
    variance: float
    third: float
    longest: int

    def __add__(self, other: "Reservation") -> "Reservation":
        return Reservation(
            self.mean + other.mean,
            self.variance + other.variance,
            self.third + other.third,
            max(self.longest, other.longest),
        )

    def times(self, queries: float) -> "Reservation":
        """Return the reservation of `queries` queries together."""
        return Reservation(self.mean * queries, self.variance * queries, self.third * queries, self.longest)

    def quantile(self, queries: float, most: float, z: float = Z999) -> int:
        """Return a percentile of the blocks held: that of `z` standard deviations of a normal, by default the 99.9th.

        The moments of `queries` queries add up, and at most `most` queries are resident.
        """
        blocks = cornish_fisher(queries * self.mean, queries * self.variance, queries * self.third, z)
        return max(self.longest, math.ceil(min(blocks, math.ceil(most) * self.longest)))


@dataclass(frozen=True, eq=False)
class BlockDistribution:
    """The number of blocks per query, for all tokens that it will ever cache, held from its admission on."""

    need: Array
    """[lengths]: D(S)."""
    survivors: Array
    """[3, lengths]: E[blocks^k · 1(D ≥ need)], k = 1, 2, 3."""
    longest: int
    """The most blocks that one query holds."""

    @staticmethod
    def of(
        workload: Workload,
        encoder_decoder: bool = False,
        resident: bool = False,
        growth: float = 1.0,
        ahead: int = 0,
        most: int | None = None,
    ) -> "BlockDistribution":
        """Return the distribution over arriving queries or, with `resident`, over resident ones.

        Resident queries are weighted by the iterations that they stay. An iteration caches `growth` tokens on average;
        there are blocks for `ahead` more. `most` is the most tokens beside the input (None: those of the longest D).
        """
        need, p = decode_iterations_of(workload.output, encoder_decoder)
        if resident:
            p = p * (need + 1)
            p = p / p.sum()
        mean, variance, third = _central(workload.input_moments)
        tokens = growth * need + ahead
        blocks = (mean + tokens + (BLOCK_SIZE - 1) / 2) / BLOCK_SIZE  # half a block is lost at the end
        spread = (variance + BLOCK_SIZE**2 / 12) / BLOCK_SIZE**2
        skew = third / BLOCK_SIZE**3
        powers = np.stack((blocks, blocks**2 + spread, blocks**3 + 3 * blocks * spread + skew))
        survivors = np.cumsum((p * powers)[:, ::-1], axis=1)[:, ::-1]
        longest = workload.input.max + (int(need.max()) if most is None else most)
        return BlockDistribution(need, survivors, -(-longest // BLOCK_SIZE))

    def reservation(self, iterations: float | None) -> Reservation:
        """Return the blocks held by RRA's residents per query that enters a phase.

        A phase has `iterations` decode iterations: N_D, or on average WAA's k. A query keeps its blocks to the end of
        its c(S) phases, so the cohorts of ages 1, 2, ... add up. Each adds the central moments of 1(D > age, or age 0)
        · blocks. `iterations` None: one query of any length (a static batch).
        """
        left = [0]  # the shortest D that is left; after no phase, all are
        if iterations is not None and iterations < self.need[-1]:
            ages = np.arange(iterations, self.need[-1], iterations)
            left += np.searchsorted(self.need, ages, side="right").tolist()
        m1, m2, m3 = self.survivors[:, left]
        third = m3 - 3 * m1 * m2 + 2 * m1**3
        return Reservation(float(m1.sum()), float((m2 - m1**2).sum()), float(third.sum()), self.longest)


def grown_blocks(
    workload: Workload, encoder_decoder: bool = False, growth: float = 1.0, ahead: int = 0, most: int | None = None
) -> Reservation:
    """Return the blocks held by one resident that has only the blocks of its tokens so far.

    These blocks hold its prompt and its generated tokens. Its age is uniform over its output. Outputs are weighted by
    the iterations that they stay. The other arguments are those of `BlockDistribution.of`.
    """
    need, p = decode_iterations_of(workload.output, encoder_decoder)
    older, *moments = (_at_least(need, p * power) for power in (np.ones_like(p), *workload.input_moments))
    of_older = np.divide(np.stack(moments), older, out=np.zeros((3, len(older))), where=older > 0)
    inputs, variances, thirds = _central(of_older)  # of the queries with D ≥ age
    tokens, weights = inputs + growth * np.arange(len(older)) + ahead, older / older.sum()
    mean = float(weights @ tokens)
    off = tokens - mean
    return Reservation(
        (mean + (BLOCK_SIZE - 1) / 2) / BLOCK_SIZE,
        float(weights @ (variances + off**2) + BLOCK_SIZE**2 / 12) / BLOCK_SIZE**2,
        float(weights @ (thirds + 3 * variances * off + off**3)) / BLOCK_SIZE**3,
        -(-(workload.input.max + (int(need.max()) if most is None else most)) // BLOCK_SIZE),
    )


def _at_least(need: Array, weights: Array) -> Array:
    """Return the sum of the weights of all D ≥ age, for age = 0, 1, ... up to the greatest D."""
    by_age = np.bincount(need.astype(np.intp), weights=weights)
    sums: Array = np.cumsum(by_age[::-1], dtype=np.float64)[::-1]
    return sums


def _central(moments: Array) -> tuple[Array, Array, Array]:
    """Return means, variances and third central moments, given the means of the first three powers."""
    first, second, third = moments
    variance = np.maximum(second - first**2, 0.0)
    return first, variance, third - 3 * first * second + 2 * first**3
