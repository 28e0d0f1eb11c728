"""Dynamic adjustment (paper section 5.2; docs/theory.md): batches that cost what the schedule predicts.

A batch's encoding time varies with the sum of its inputs, and the decoding batch with the number of sequences that end.
Both stay near their targets if the next batch is picked from the front of the queue accordingly.
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
    """Targets, and the share `threshold` by which they may be missed without a correction."""

    threshold: float
    input_mean: float
    """Tokens of a prompt."""
    encode_batch: int
    """B_E"""
    decode_batch: int
    """B_D: residents just after a batch has joined."""

    def count(self, residents: int) -> int:
        """Return how many sequences to encode next if `residents` are resident.

        The number is B_E, unless the decoding batch would then miss its target by more than the threshold. Then it
        differs from B_E by up to the threshold.
        """
        missed = residents + self.encode_batch - self.decode_batch
        if abs(missed) <= self.threshold * self.decode_batch:
            return self.encode_batch
        most = max(1, round(self.threshold * self.encode_batch))
        return max(1, self.encode_batch - min(max(missed, -most), most))

    def pick(self, candidates: Items[Sequence], count: int) -> list[Sequence]:
        """Pick `count` candidates, in their order, so that the sum of their inputs is within the threshold of its mean.

        A few exchanges try to reach this. The first in the queue is always picked, so that no sequence waits for ever.
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
    """Yield exchanges that bring the sum nearest to its target, for each chosen candidate but the first.

    `others` are in the order of their lengths. There are up to two exchanges: with the nearest shorter and longer
    candidate. Each is the remaining error and the places of both candidates.
    """
    for leaves in range(1, len(chosen)):
        wanted = candidates[chosen[leaves]].input_tokens - excess
        above = bisect_left(others, wanted, key=lambda i: candidates[i].input_tokens)
        for comes in (above - 1, above):
            if 0 <= comes < len(others):
                yield abs(candidates[others[comes]].input_tokens - wanted), leaves, comes
