"""The cost of one model's iterations on a share of its devices."""

from collections.abc import Sequence as Items
from typing import Protocol

from xcore.arrays import Array
from xcore.specs.iteration_profile import IterationProfile, IterationTables
from xsimulator.cost.cost_model import ReplicaCost
from xsimulator.cost.decode_cache import DecodeStepCache, decode_contexts
from xsimulator.cost.stage import Chunks


class IterationCost(Protocol):
    """Seconds of a model's iterations by their share of the multiprocessors."""

    def prefill_seconds(self, tokens: Items[int], share: float) -> float:
        """Return the seconds to prefill complete prompts of these lengths."""

    def decode_seconds(self, sequences: int, contexts: Array, share: float) -> Array:
        """Return seconds of decoding iterations of `sequences` sequences at these mean contexts.

        The result has the contexts' shape.
        """


class TableCost:
    """Costs from measured iterations; between measured shares, linear in 1 / share."""

    def __init__(self, profile: IterationProfile, tp: int):
        self._tables = profile.of(tp)
        self._decode: dict[float, DecodeStepCache] = {}
        """By share."""

    def prefill_seconds(self, tokens: Items[int], share: float) -> float:
        """Return the seconds of a batch of equal prompts with the same total number of tokens."""
        total, squares = sum(tokens), sum([count * count for count in tokens])
        length = squares / total  # what attention sees on average
        return sum(weight * tables.prefill.at(total / length, length) for tables, weight in self._around(share))

    def decode_seconds(self, sequences: int, contexts: Array, share: float) -> Array:
        """Return the tables' seconds; a batch's seconds are linear in the context between the points."""
        if share not in self._decode:
            around = self._around(share)

            def seconds_of(batch: int, context: float) -> float:
                return sum(weight * tables.decode.at(batch, context) for tables, weight in around)

            self._decode[share] = DecodeStepCache(self._tables[0].decode.points[1], seconds_of)
        return self._decode[share](sequences, contexts)

    def _around(self, share: float) -> list[tuple[IterationTables, float]]:
        """Return the tables on both sides of a share, and their weights; below the smallest share, as 1 / share."""
        shares = [tables.share for tables in self._tables]
        if share <= shares[0]:
            return [(self._tables[0], shares[0] / share)]
        if share >= shares[-1]:
            return [(self._tables[-1], 1.0)]
        above = next(i for i, known in enumerate(shares) if known >= share)
        low, high = 1 / shares[above], 1 / shares[above - 1]
        weight = (1 / share - low) / (high - low)
        both = [(self._tables[above], 1 - weight), (self._tables[above - 1], weight)]
        return [(tables, part) for tables, part in both if part]


DECODE_SATURATES = 0.4
"""The share of the multiprocessors that uses nearly all of a device's memory bandwidth.

Measured for decoding of LLaMA-7B to 65B on MuxServe's A100s. On 40 to 50 % of the multiprocessors it takes 1.0 to 1.2
times as long as on all, and on 30 % 1.3 times as long.
"""


class ProfileCost:
    """Costs from a profile of layers, which was measured on complete devices.

    On a share of a device, prefill takes 1 / share times as long, since it is compute-bound. Decoding takes as long as
    on the complete device down to the share that no longer saturates the memory.
    """

    def __init__(self, replica_cost: ReplicaCost):
        self._costs = replica_cost.decode.costs
        self._travel = replica_cost.decode.hops_together
        self._decode = DecodeStepCache(decode_contexts(self._costs[0]), self._decode_step)

    def prefill_seconds(self, tokens: Items[int], share: float) -> float:
        """Return the seconds through all stages, one after the other."""
        chunks = Chunks(tokens, [0] * len(tokens), len(tokens))
        return (sum(cost.step(chunks, 0, 0.0) for cost in self._costs) + self._travel(sum(tokens))) / share

    def decode_seconds(self, sequences: int, contexts: Array, share: float) -> Array:
        """Return the seconds through all stages, one after the other."""
        return self._decode(sequences, contexts) * max(1.0, DECODE_SATURATES / share)

    def _decode_step(self, sequences: int, context: float) -> float:
        return sum(cost.step(None, sequences, context) for cost in self._costs) + self._travel(sequences)


ALIKE, UNLIKE = 1.04, 1.08
"""Default factors by which iterations take longer where models share merged KV blocks on GPUs (SeaLLM, Figure 15).

Below 4 % for three of six LLMs, below 8 % for all. The larger one holds where their blocks differ. On CPUs,
`exegpt profile` measures the factor (`Profile.merged_blocks`) and the switch of model.
"""


def sharing_overhead(block_bytes: Items[int]) -> float:
    """Return the factor by which iterations of models that share memory take longer.

    `block_bytes` are the bytes of their KV blocks. The factor is 1 for one model alone.
    """
    if len(block_bytes) < 2:
        return 1.0
    return ALIKE if len(set(block_bytes)) == 1 else UNLIKE
