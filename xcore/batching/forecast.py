"""Forecast: whether free blocks suffice for a while, from the lengths' distribution conditioned on what sequences have
generated.

Where admission is *grow* and a policy admits rarely, what fits now may be short long before the next admission. So it
admits as many as have, at a stated probability, blocks for so many iterations ahead. A sequence of g output tokens
still runs after k more with probability P(S > g + k) / P(S > g), and then holds blocks for k more tokens; sequences end
independently, and their sum is taken as normal.
"""

from collections.abc import Iterable
from statistics import NormalDist

import numpy as np

from xcore.batching.kv_pool import KVPool
from xcore.batching.sequence import PREEMPTED, WAITING, Sequence
from xcore.specs.workload import LengthDistribution

PROBABILITY = 0.9
"""That the blocks of those admitted suffice, at each iteration ahead (docs/theory.md: what others would give)."""
_MOMENTS = 8
"""Iterations ahead that are looked at, evenly spread."""

Array = np.ndarray


class Forecast:
    """Of `iterations` decoding iterations ahead of sequences whose outputs have lengths of a distribution."""

    def __init__(self, output: LengthDistribution, iterations: int, probability: float = PROBABILITY):
        counts = np.zeros(output.max + 1)
        counts[list(output.lengths)] = output.p
        self._longer = np.maximum(1.0 - np.cumsum(counts), 0.0)
        """[longest + 1]: P(S > n)."""
        self._longer[-1] = 0.0
        self._ahead = np.unique(np.linspace(1, iterations, min(iterations, _MOMENTS)).round().astype(np.int64))
        self.deviations = NormalDist().inv_cdf(probability)
        """Standard deviations above the mean for which there must be blocks."""

    def outlook(self, pool: KVPool, residents: Iterable[Sequence]) -> "Outlook":
        """What these residents of a pool, which hold all blocks that aren't free, will need."""
        return Outlook(self, pool, residents)

    def demand(self, pool: KVPool, sequence: Sequence) -> tuple[Array, Array]:
        """[moments] each: mean and variance of the blocks that a sequence needs, which is resident or waits; from the
        second iteration on it may have ended.
        """
        unfinished, generated, cached = sequence.generated, sequence.generated, sequence.cached
        if sequence.status in (WAITING, PREEMPTED):  # its prefill gives a token first
            unfinished, generated = sequence.recomputed, sequence.recomputed + 1
            cached = sequence.input_tokens + sequence.recomputed
        before = generated + self._ahead - 1
        running = np.where(before < sequence.max_output, self._running(unfinished, before), 0.0)
        blocks = -(-(cached + self._ahead) // pool.block_size)
        return running * blocks, running * (1.0 - running) * blocks**2

    def _running(self, unfinished: int, tokens: Array) -> Array:
        """[moments]: probabilities that a sequence doesn't end with so many tokens, having not with `unfinished`. One
        that is longer than any of the distribution doesn't.
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
        self._mean = self._variance = np.zeros(1)
        self._blocks = pool.available
        for sequence in residents:
            self._blocks += len(sequence.blocks)
            self._add(forecast.demand(pool, sequence))

    def admits(self, sequence: Sequence) -> bool:
        """Whether the blocks suffice with this sequence too, which then counts."""
        mean, variance = self._forecast.demand(self._pool, sequence)
        needed = self._mean + mean + self._forecast.deviations * np.sqrt(self._variance + variance)
        if (needed > self._blocks).any():
            return False
        self._add((mean, variance))
        return True

    def _add(self, demand: tuple[Array, Array]) -> None:
        self._mean, self._variance = self._mean + demand[0], self._variance + demand[1]
