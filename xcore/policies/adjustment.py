"""Dynamic adjustment (paper section 5.2; docs/theory.md): batches that cost what the schedule reckoned with.

A batch's encoding time varies with the sum of its inputs, and the decoding batch with how many happen to end. Both
stay near their targets where the next batch is picked from the front of the queue with that in mind.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

from xcore.batching import Sequence

PEEKED_BATCHES = 4
"""Batches at the front of the queue from which the next one is picked."""


@dataclass(frozen=True)
class Adjustment:
    """Targets, and the share `threshold` by which they may be missed before something is done about it."""

    threshold: float
    input_mean: float
    """Tokens of a prompt."""
    encode_batch: int
    """B_E"""
    decode_batch: int
    """B_D: residents just after a batch has joined."""

    def count(self, residents: int) -> int:
        """How many sequences to encode next beside so many residents: fewer or more than B_E, by up to the threshold,
        where the decoding batch would miss its target by more than that.
        """
        missed = residents + self.encode_batch - self.decode_batch
        if abs(missed) <= self.threshold * self.decode_batch:
            return self.encode_batch
        most = max(1, round(self.threshold * self.encode_batch))
        return max(1, self.encode_batch - min(max(missed, -most), most))

    def pick(self, candidates: Items[Sequence], count: int) -> list[Sequence]:
        """`count` of the candidates, in their order, whose inputs' sum is within the threshold of its mean, if a few
        exchanges get there: the first in the queue always goes, so that nobody waits for ever.
        """
        chosen, others = list(range(len(candidates)))[:count], list(range(len(candidates)))[count:]
        others.sort(key=lambda i: candidates[i].input_tokens)
        target = self.input_mean * len(chosen)
        excess = sum(candidates[i].input_tokens for i in chosen) - target
        while abs(excess) > self.threshold * target and len(chosen) > 1 and others:
            missed, leaves, comes = min(_exchanges(candidates, chosen, others, excess))
            if missed >= abs(excess):
                break
            excess += candidates[others[comes]].input_tokens - candidates[chosen[leaves]].input_tokens
            gone, chosen[leaves] = chosen[leaves], others.pop(comes)
            insort(others, gone, key=lambda i: candidates[i].input_tokens)
        return [candidates[i] for i in sorted(chosen)]


def _exchanges(
    candidates: Items[Sequence], chosen: list[int], others: list[int], excess: float
) -> Iterator[tuple[float, int, int]]:
    """For each of the chosen but the first, the exchange with one of the others, in order of their lengths, that brings
    the sum nearest to its target: by how much that is missed then, and the places of both.
    """
    for leaves in range(1, len(chosen)):
        wanted = candidates[chosen[leaves]].input_tokens - excess
        above = bisect_left(others, wanted, key=lambda i: candidates[i].input_tokens)
        for comes in (above - 1, above):
            if 0 <= comes < len(others):
                yield abs(candidates[others[comes]].input_tokens - wanted), leaves, comes
