"""Prompts of varying lengths: the expected seconds to prefill batches of them, and the variation of these seconds."""

import functools
import math
from dataclasses import dataclass, fields
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from xcore.arrays import Array
from xcore.policies.waa import most_underway
from xcore.specs.workload import LengthDistribution
from xsimulator.cost.group import PARTS, Group, PartSeconds
from xsimulator.cost.memo import memoized
from xsimulator.cost.side import Side
from xsimulator.steady.pipeline import tandem_times

_FOR_TOKENS, _FOR_ATTENTION = 24, 64
"""Number of lengths that sum a distribution up: for a batch's tokens, and for a prompt's attention."""
_SHARES = np.concatenate([np.arange(1, 15) / 16, 1 - 0.5 ** np.arange(3.5, 11, 0.5)])
"""Shares of the requests at which the kinds for percentiles end; they are finer towards the longest prompts."""
_QUANTILES = 32
_SHUFFLED = np.concatenate([np.random.default_rng(seed).permutation(_QUANTILES) for seed in range(8)])
"""Batches to follow through an encoding side, as quantiles of their time."""


@dataclass(frozen=True)
class Encoding:
    """Batches of prompts, one after the other, on an encoding side; in seconds."""

    period: float
    """T_E: time from one batch to the next, set by the slowest stage or its transfer."""
    alone: float
    """Time from a batch's start to its end on the last stage, if the side is otherwise empty."""
    traversal: float
    """The same time with other batches before and behind it."""
    kv_transfer: float
    """Time from the end of a batch's encoding until the decoding side can merge it."""
    deviation: float
    """Standard deviation of a batch's encoding time, since its lengths vary."""
    busy: Array
    """[stages]: seconds of work per batch."""

    def towards(self, other: "Encoding", share: float) -> "Encoding":
        """Interpolate linearly towards `other`, by the share `share` of the way."""
        pairs = {part.name: (getattr(self, part.name), getattr(other, part.name)) for part in fields(self)}
        return Encoding(**{name: (1 - share) * this + share * that for name, (this, that) in pairs.items()})


@dataclass(frozen=True, eq=False)
class Prompts:
    """Prompts whose lengths have this distribution."""

    lengths: LengthDistribution
    past: float = 0.0
    """Cached tokens before each token of a prompt's own, on average."""

    @property
    def mean(self) -> float:
        """Return the expected tokens of a prompt."""
        return self.lengths.mean

    @functools.cached_property
    def kinds(self) -> tuple[Array, Array]:
        """Return few lengths that stand for all, and their probabilities."""
        return kinds_of(self.lengths)

    @functools.cached_property
    def _for_tokens(self) -> tuple[Array, Array]:
        return thinned(self.lengths, _FOR_TOKENS)

    @functools.cached_property
    def _for_attention(self) -> tuple[Array, Array]:
        return thinned(self.lengths, _FOR_ATTENTION)

    def tokens(self, batch: ArrayLike) -> tuple[Array, Array]:
        """Return the tokens of `batch` prompts together: values [..., k] and their probabilities [k].

        For one prompt this is the distribution itself. For more it keeps the shape and has the sum's mean and
        deviation.
        """
        n, (s, p) = np.asarray(batch, dtype=np.float64)[..., None], self._for_tokens
        return n * self.mean + np.sqrt(n) * (s - self.mean), p

    def attention(self, group: Group, batch: ArrayLike) -> Array:
        """Return the expected seconds of one layer's attention for `batch` whole prompts; the batch's shape."""
        s, p = self._for_attention
        seconds: Array = self.attention_of(group, np.asarray(batch)[..., None], s) @ p
        return seconds

    def attention_of(self, group: Group, batch: ArrayLike, length: ArrayLike) -> Array:
        """Return the seconds of one layer's attention for `batch` prompts of one length, after their cached tokens."""
        if not self.past:
            return group.prompt_attention(batch, length)
        seconds: Array = np.asarray(batch) * group.chunk_attention(length, self.past * np.asarray(length))
        return seconds

    def encode(self, group: Group, batch: ArrayLike) -> PartSeconds:
        """Return the expected seconds to prefill `batch` whole prompts; the batch's shape.

        The time isn't linear in tokens: it bends at the point from which computing takes longer than reading the
        weights. So the times are averaged over the distribution of the batch's tokens.
        """
        n = np.asarray(batch, dtype=np.float64)
        tokens, p = self.tokens(n)
        parts = group.part_seconds(tokens, n[..., None], 0.0, (0.0, 0.0)).map(lambda part: _expected(part, p))
        return group.with_attention(parts, self.attention(group, n))

    @memoized
    def micro_batches(self, group: Group, batch: float, count: int, left: float = 1.0) -> PartSeconds:
        """Return [count]: expected seconds to prefill `count` micro-batches of `batch` prompts each, shortest first.

        The longest micro-batch delays a pipeline. The micro-batches are the quantiles of their total's normal
        distribution, of whose standard deviation the share `left` remains.
        """
        lengths = self.mean + even_normal(count) * left * self.lengths.std / batch**0.5
        spread = group.encode_fixed(batch, np.maximum(lengths, self.lengths.s[0]))
        means = self.encode(group, batch)
        return PartSeconds(**{name: _scaled(getattr(spread, name), getattr(means, name), count) for name in PARTS})

    @memoized
    def deviation(self, side: Side, batch: float) -> float:
        """Return the standard deviation of the slowest stage's time to prefill `batch` prompts of varying lengths."""
        lengths = self.mean * np.array([0.95, 1.05])
        shorter, longer = side.each(lambda group: group.encode_fixed(batch, lengths))
        slope = float((longer - shorter).max()) / (0.1 * self.mean * batch)
        return float(slope * batch**0.5 * self.lengths.std)

    def decode_deviation(
        self, side: Side, batch: float, context: float, micro_batches: int, varying: float = 0.0
    ) -> float:
        """Return the standard deviation of the seconds of iterations that decode `batch` sequences in `micro_batches`.

        The mean of their prompts' lengths varies. `context` is the mean context, `varying` the deviation of their
        number.
        """
        std = self.lengths.std / batch**0.5
        batches = np.array([batch, batch, max(batch - varying, 1.0), batch + varying]) / micro_batches
        contexts = np.array([max(context - std, 1.0), context + std, context, context])
        cells: list[list[float]] = side.decode(batches, contexts).tolist()
        short, long, few, many = (max(sum(stages), micro_batches * max(stages)) for stages in cells)
        return math.hypot(long - short, many - few) / 2

    @memoized
    def batches(self, side: Side, batch: int, left: float = 1.0) -> Encoding:
        """Return the times of batches of `batch` prompts, one after the other through a side, without KV transfers.

        Their lengths vary, so short batches wait behind long ones. Some hundred batches, at the quantiles of their
        distribution, are simulated, with at most as many in flight as WAA allows. The share `left` of the
        standard deviation of their tokens remains.
        """
        seconds = side.each(lambda group: self.encode(group, batch))
        hops = side.hops(batch * self.mean)
        alone, period, traversal = float(seconds.sum() + hops.sum()), float(seconds.max()), 0.0
        deviation = left * self.deviation(side, batch)
        if len(side.stages) > 1:
            drawn = side.each(lambda group: self.micro_batches(group, batch, _QUANTILES, left))[_SHUFFLED]
            followed, traversal, deviation = tandem_times(drawn, hops, most_underway(len(side.stages)))
            period = max(period, followed)  # the mean of some hundred batches may be below the distribution's mean
        return Encoding(period, alone, max(traversal, alone), 0.0, deviation, seconds)


def thinned(distribution: LengthDistribution, most: int) -> tuple[Array, Array]:
    """Reduce a distribution to at most `most` lengths: neighbours are merged at their mean."""
    s: Array = distribution.s
    p: Array = distribution.p
    if len(s) <= most:
        return s, p
    starts = np.arange(most) * len(s) // most
    weight = np.add.reduceat(p, starts)
    kept = weight > 0
    return (np.add.reduceat(p * s, starts)[kept] / weight[kept]), weight[kept]


def kinds_of(distribution: LengthDistribution) -> tuple[Array, Array]:
    """Return few lengths that stand for all requests, and their shares.

    Requests of the nearest lengths are merged at their mean.
    """
    s, p = distribution.s, distribution.p
    starts = np.unique(np.concatenate([[0], np.searchsorted(np.cumsum(p), _SHARES, side="right")]))
    starts = starts[starts < len(s)]
    weight = np.add.reduceat(p, starts)
    kept = weight > 0
    return np.add.reduceat(p * s, starts)[kept] / weight[kept], weight[kept]


def _expected(part: ArrayLike, p: Array) -> Array:
    """Return the mean over the last axis; a scalar stays unchanged."""
    values = np.asarray(part, dtype=np.float64)
    if not values.ndim:
        return values
    mean: Array = values[..., 0] if values.shape[-1] == 1 else values @ p
    return mean


def _scaled(part: ArrayLike, expected: ArrayLike, count: int) -> Array:
    """Scale the micro-batches' seconds to the expected mean."""
    mean = float(np.asarray(expected))
    values = np.broadcast_to(np.asarray(part, dtype=np.float64), (count,))
    mean_of_parts = float(values.mean())
    return values * (mean / mean_of_parts) if mean_of_parts else np.full(count, mean)


@functools.cache
def even_normal(count: int) -> Array:
    """Return `count` equally likely values of a standard normal: the middle quantiles of equal shares."""
    normal = NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)])
