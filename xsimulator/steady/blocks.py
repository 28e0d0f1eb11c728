"""KV blocks that residents hold, its distribution by three moments (docs/theory.md)."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xcore.specs.schedule import BLOCK_SIZE
from xcore.specs.workload import Workload
from xsimulator.steady.residents import Z999, cornish_fisher, decode_iterations_of

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Reservation:
    """Blocks that residents hold: unit moments per query, and the most that one query holds.

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
        """So many queries together."""
        return Reservation(self.mean * queries, self.variance * queries, self.third * queries, self.longest)

    def quantile(self, queries: float, most: float, z: float = Z999) -> int:
        """The 99.9th percentile, or the one that is the standard normal's `z`, of the blocks held where `queries`
        queries add up and at most `most` are resident.
        """
        blocks = cornish_fisher(queries * self.mean, queries * self.variance, queries * self.third, z)
        return max(self.longest, math.ceil(min(blocks, math.ceil(most) * self.longest)))


@dataclass(frozen=True, eq=False)
class BlockDistribution:
    """How many blocks queries hold: all of the tokens that they will ever cache, from their admission on."""

    need: Array
    """[lengths]: D(S)."""
    survivors: Array
    """[3, lengths]: E[blocks^k · 1(D ≥ need)], k = 1, 2, 3."""
    longest: int
    """The most that one query holds."""

    @staticmethod
    def of(workload: Workload, encoder_decoder: bool = False, resident: bool = False) -> "BlockDistribution":
        """Of the queries that arrive, or of those found `resident`: as often as the iterations that they stay."""
        need, p = decode_iterations_of(workload.output, encoder_decoder)
        if resident:
            p = p * (need + 1)
            p = p / p.sum()
        inputs = workload.input
        blocks = (inputs.mean + need + (BLOCK_SIZE - 1) / 2) / BLOCK_SIZE  # half a block is lost at the end
        spread = (inputs.std**2 + BLOCK_SIZE**2 / 12) / BLOCK_SIZE**2
        skew = float(inputs.p @ (inputs.s - inputs.mean) ** 3) / BLOCK_SIZE**3
        powers = np.stack((blocks, blocks**2 + spread, blocks**3 + 3 * blocks * spread + skew))
        survivors = np.cumsum((p * powers)[:, ::-1], axis=1)[:, ::-1]
        return BlockDistribution(need, survivors, -(-(inputs.max + int(need.max())) // BLOCK_SIZE))

    def reservation(self, iterations: float | None) -> Reservation:
        """Blocks held by RRA's residents per query that enters a phase of `iterations` (N_D; WAA's k on average).

        A query keeps its blocks to the end of its c(S) phases, so the cohorts of ages 1, 2, ... add up: of each the
        central moments of 1(D > age, or age 0) · blocks. None: one query, whoever arrives (a static batch).
        """
        left = [0]  # the shortest that is left; after no phase, all
        if iterations is not None and iterations < self.need[-1]:
            ages = np.arange(iterations, self.need[-1], iterations)
            left += np.searchsorted(self.need, ages, side="right").tolist()
        m1, m2, m3 = self.survivors[:, left]
        third = m3 - 3 * m1 * m2 + 2 * m1**3
        return Reservation(float(m1.sum()), float((m2 - m1**2).sum()), float(third.sum()), self.longest)


def grown_blocks(workload: Workload, encoder_decoder: bool = False) -> Reservation:
    """Blocks held by one resident that has those of its tokens so far: its prompt's and, with an age that is uniform
    over an output as likely as the iterations that it stays, of what it has generated.
    """
    need, p = decode_iterations_of(workload.output, encoder_decoder)
    older = np.cumsum(np.bincount(need.astype(np.intp), weights=p)[::-1])[::-1]  # P(D ≥ age)
    ages, weights = np.arange(len(older)), older / older.sum()
    inputs, age = workload.input, float(weights @ ages)
    variance = inputs.std**2 + float(weights @ (ages - age) ** 2) + BLOCK_SIZE**2 / 12
    third = float(inputs.p @ (inputs.s - inputs.mean) ** 3 + weights @ (ages - age) ** 3)
    return Reservation(
        (inputs.mean + age + (BLOCK_SIZE - 1) / 2) / BLOCK_SIZE,
        variance / BLOCK_SIZE**2,
        third / BLOCK_SIZE**3,
        -(-(inputs.max + int(need.max())) // BLOCK_SIZE),
    )
