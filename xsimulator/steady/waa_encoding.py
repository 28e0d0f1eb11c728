"""WAA's encoding side: batches one after the other through its stages."""

import bisect
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from exegpt.policies.waa import most_underway
from xsimulator.steady.kv_transfer import kv_transfer_seconds
from xsimulator.steady.pipeline import tandem_times
from xsimulator.steady.scenario import Scenario

Array = NDArray[np.float64]

_QUANTILES = 32
_SHUFFLED = np.concatenate([np.random.default_rng(seed).permutation(_QUANTILES) for seed in range(8)])
"""Batches that are followed through the encoding side, by the quantile of their time."""


@dataclass(frozen=True)
class Encoding:
    """The encoding side, seconds."""

    period: float
    """T_E: from one batch to the next, the slowest stage or its transfer."""
    alone: float
    """From a batch's start to its end on the last stage, where none is in its way."""
    traversal: float
    """The same with others before and behind it."""
    kv_transfer: float
    """From there until the decoding side can merge it."""
    deviation: float
    """Of a batch's encoding time, for its lengths vary."""
    busy: Array
    """[stages]: seconds of work per batch."""


def encoding(scenario: Scenario, encode_batch: int) -> Encoding:
    """The encoding side with batches of B_E, one after the other through its stages.

    Their lengths vary, so that short batches wait behind long ones: some hundred, at the quantiles of their
    distribution, are followed through the stages, with no more under way than the policy allows.
    """

    def make() -> Encoding:
        side = scenario.once(("encoding", scenario.encode, encode_batch), lambda: _encoding(scenario, encode_batch))
        kv_transfer = kv_transfer_seconds(scenario, encode_batch * scenario.workload.input.mean)
        return replace(side, kv_transfer=kv_transfer, period=max(side.period, kv_transfer / 2))

    return scenario.once(("encoding", scenario.encode, scenario.decode, encode_batch), make)


def _encoding(scenario: Scenario, encode_batch: int) -> Encoding:
    """The same without the KV transfer."""
    side, distribution = scenario.encode, scenario.workload.input
    seconds = side.each(lambda group: group.encode(encode_batch, distribution))
    hops = scenario.hops(side, encode_batch * distribution.mean)
    alone, period, traversal = float(seconds.sum() + hops.sum()), float(seconds.max()), 0.0
    deviation = side.encode_deviation(encode_batch, distribution)
    if len(side.stages) > 1:
        drawn = side.each(lambda group: group.encode_parts(encode_batch, distribution, _QUANTILES))[_SHUFFLED]
        followed, traversal, deviation = tandem_times(drawn, hops, most_underway(len(side.stages)))
        period = max(period, followed)  # some hundred batches' mean may lie below the distribution's own
    return Encoding(period, alone, max(traversal, alone), 0.0, deviation, seconds)


BATCHES: list[int] = np.unique(np.rint(2.0 ** np.arange(0, 14, 0.5))).astype(int).tolist()
"""Between which the encoding side is taken to be linear."""


def between(scenario: Scenario, batch: float) -> tuple[Encoding, float]:
    """The encoding side with `batch` prompts at once on average, on a line between some whole numbers of them; and the
    seconds that one more takes.
    """
    place = min(bisect.bisect_right(BATCHES, batch), len(BATCHES) - 1)
    low, high = BATCHES[place - 1], BATCHES[place]
    few, many = encoding(scenario, low), encoding(scenario, high)
    share = (batch - low) / (high - low)
    pairs = zip(vars(few).values(), vars(many).values(), strict=True)
    more = (many.alone - few.alone) / (high - low)
    return Encoding(*((1 - share) * low_value + share * high_value for low_value, high_value in pairs)), more
