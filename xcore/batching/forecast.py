"""Forecast: whether free blocks suffice for the next iterations, by the distribution of the output lengths.

With admission *grow* and rare admissions, blocks that suffice now may run short long before the next admission. The
policy therefore admits only as many sequences as have blocks for some iterations ahead, with a stated probability. A
sequence of g output tokens still runs after k more with probability P(S > g + k) / P(S > g), and then holds blocks for
k more tokens. Sequences end independently, and their sum counts as normal.
"""

from collections.abc import Iterable
from statistics import NormalDist

import numpy as np

from xcore.arrays import Array, Integers
from xcore.batching.kv_pool import KVPool
from xcore.batching.sequence import PREEMPTED, WAITING, Sequence
from xcore.specs.workload import LengthDistribution

PROBABILITY = 0.9
"""Probability that the admitted sequences' blocks suffice, at each iteration ahead.

docs/theory.md shows the effect of other values.
"""
_MOMENTS = 8
"""Number of iterations ahead that are checked, evenly spread."""


class Forecast:
    """Forecasts `iterations` decode iterations ahead for sequences whose outputs have a distribution of lengths."""

    def __init__(self, output: LengthDistribution, iterations: int, probability: float = PROBABILITY):
        counts = np.zeros(output.max + 1)
        counts[list(output.lengths)] = output.p
        self._longer = np.maximum(1.0 - np.cumsum(counts), 0.0)
        """[longest + 1]: P(S > n)."""
        self._longer[-1] = 0.0
        self._ahead = np.unique(np.linspace(1, iterations, min(iterations, _MOMENTS)).round().astype(np.int64))
        self.deviations = NormalDist().inv_cdf(probability)
        """Standard deviations above the mean for which blocks must be free."""

    def outlook(self, pool: KVPool, residents: Iterable[Sequence]) -> "Outlook":
        """Return the outlook of a pool whose residents hold all blocks that aren't free."""
        return Outlook(self, pool, residents)

    def demand(self, pool: KVPool, sequence: Sequence) -> tuple[Array, Array, Array]:
        """Return the mean, the variance and the most of the blocks that a sequence needs, each [moments].

        The sequence is resident or waiting. From the second iteration on, it may have ended.
        """
        unfinished, generated, cached = sequence.generated, sequence.generated, sequence.cached
        if sequence.status in (WAITING, PREEMPTED):  # its prefill gives a token first
            unfinished, generated = sequence.recomputed, sequence.recomputed + 1
            cached = sequence.input_tokens + sequence.recomputed
        before = generated + self._ahead - 1
        running = np.where(before < sequence.max_output, self._running(unfinished, before), 0.0)
        blocks = -(-(cached + self._ahead) // pool.block_size)
        return running * blocks, running * (1.0 - running) * blocks**2, np.where(running > 0.0, blocks, 0.0)

    def _running(self, unfinished: int, tokens: Integers) -> Array:
        """Return [moments]: probabilities that a sequence continues after `tokens` tokens.

        It is known to continue after `unfinished` tokens. A sequence longer than every length of the distribution
        always continues.
        """
        last = len(self._longer) - 1
        now = self._longer[min(unfinished, last)]
        if now <= 0.0:
            return np.ones(len(tokens))
        running: Array = self._longer[np.minimum(tokens, last)] / now
        return running


class Outlook:
    """The blocks that residents and newly admitted sequences will need."""

    def __init__(self, forecast: Forecast, pool: KVPool, residents: Iterable[Sequence]):
        self._forecast, self._pool = forecast, pool
        self._mean = self._variance = self._most = np.zeros(1)
        self._blocks = pool.available
        for sequence in residents:
            self._blocks += len(sequence.blocks)
            self._add(forecast.demand(pool, sequence))

    def admits(self, sequence: Sequence) -> bool:
        """Return whether the blocks suffice with this sequence too; if so, count the sequence from now on.

        Few sequences are far from normal: their sum may never be as much as the normal's quantile.
        """
        mean, variance, most = demand = self._forecast.demand(self._pool, sequence)
        likely = self._mean + mean + self._forecast.deviations * np.sqrt(self._variance + variance)
        if (np.minimum(likely, self._most + most) > self._blocks).any():
            return False
        self._add(demand)
        return True

    def _add(self, demand: tuple[Array, Array, Array]) -> None:
        mean, variance, most = demand
        self._mean, self._variance, self._most = self._mean + mean, self._variance + variance, self._most + most
