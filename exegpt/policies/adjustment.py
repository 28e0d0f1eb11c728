"""Dynamic adjustment (paper section 5.2; spec section 8): batches that cost what the schedule reckoned with.

A batch's encoding time varies with the sum of its inputs, and the decoding batch with how many happen to end. Both
stay near their targets where the next batch is picked from the front of the queue with that in mind.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np

from exegpt.policies.ledger import Sequence

FRONT = 4
"""How many batches of the queue's front are picked from."""


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

    def pick(self, front: Items[Sequence], count: int) -> list[Sequence]:
        """`count` sequences of the front, in its order, whose inputs' sum is within the threshold of its mean, if a few
        exchanges get there: the first in the queue always goes, so that nobody waits for ever.
        """
        tokens = np.array([one.input_tokens for one in front], dtype=np.float64)
        chosen, others = np.arange(len(front))[:count], np.arange(len(front))[count:]
        target = self.input_mean * len(chosen)
        excess = tokens[chosen].sum() - target
        while abs(excess) > self.threshold * target and len(chosen) > 1 and len(others):
            # the exchange of two that brings the sum nearest to its target
            missed = np.abs(excess + tokens[others][None, :] - tokens[chosen[1:]][:, None])
            leaves, comes = np.unravel_index(missed.argmin(), missed.shape)
            if missed[leaves, comes] >= abs(excess):
                break
            chosen[1 + leaves], others[comes] = others[comes], chosen[1 + leaves]
            excess = tokens[chosen].sum() - target
        return [front[i] for i in sorted(chosen)]
