"""Sampling state: the tokens so far of each sequence with a penalty, on the sampling rank.

A sequence has a slot, which is a row, from the beginning of its prefill to its end. The driver allocates slots and
sends only new tokens: the prompt with the sequence's first sampling, one output token with each later one.
"""

from collections.abc import Sequence

import torch

from exegpt.kernels.logit_edits import LogitEdits
from exegpt.kernels.sampling import Sampling
from xcore.arrays import Numbers

_SLOT = 6
"""Index of the slots among the arrays of a sampling."""
_UNCOUNTED = -2
"""Index of the slots whose counting begins, among the arrays of edits."""


class Slots:
    """Allocates slots of the sampling state, on the driver."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._count = 0

    def allocate(self) -> int:
        """Return a free slot: the one that was freed last, or a new one."""
        if self._free:
            return self._free.pop()
        self._count += 1
        return self._count - 1

    def free(self, slot: int) -> None:
        """Free a slot whose sequence has ended."""
        self._free.append(slot)


class SamplingState:
    """The sampling rank's record of sampled tokens; it doubles when a slot is beyond it.

    It has one byte per slot and token of the vocabulary, and counts for sequences with count penalties.
    """

    def __init__(self, vocab: int, device: torch.device):
        self.seen = torch.zeros(1, vocab, dtype=torch.uint8, device=device)
        """See `Sampling.seen`."""
        self.counts = torch.zeros(1, vocab, dtype=torch.int32, device=device)
        """See `LogitEdits.counts`."""

    @torch.inference_mode()
    def sampling(
        self, arrays: Sequence[Numbers], edits: Sequence[Numbers] | None, tensors: Sequence[torch.Tensor]
    ) -> Sampling:
        """Return a batch's sampling, after its new tokens are entered.

        `arrays` are those of `DeviceBatch.sampling`, `edits` those of its edits, and `tensors` all of them on the
        device.
        """
        sampling, edited = tensors[: len(arrays)], tensors[len(arrays) :]
        temperature, top_k, top_p, penalty, seed, position, slot, log_min_p, cleared, added = sampling
        self.seen = _reserved(self.seen, arrays[_SLOT])
        if len(cleared):
            self.seen.index_fill_(0, cleared, 0)
        if added.shape[1]:
            slots, tokens = added
            self.seen.view(-1).index_fill_(0, slots * self.seen.shape[1] + tokens, 1)
        rows = temperature, top_k, top_p, penalty, seed, position, slot
        made = None if edits is None else self._edits(edits, edited)
        return Sampling(*rows, self.seen, log_min_p if len(log_min_p) else None, made)

    def _edits(self, arrays: Sequence[Numbers], tensors: Sequence[torch.Tensor]) -> LogitEdits:
        """Return a batch's edits, after its new tokens are counted."""
        rows, penalty, frequency, presence, slot, mask, allowed, biased, bias, cleared, added = tensors
        self.counts = _reserved(self.counts, arrays[_UNCOUNTED])
        if len(cleared):
            self.counts.index_fill_(0, cleared, 0)
        if added.shape[1]:
            slots, tokens = added
            ones = torch.ones_like(tokens, dtype=torch.int32)
            self.counts.view(-1).index_add_(0, slots * self.counts.shape[1] + tokens, ones)
        penalties = penalty, frequency, presence
        return LogitEdits(rows, *penalties, slot, mask, allowed, biased, bias, self.seen, self.counts)


def _reserved(state: torch.Tensor, slots: Numbers) -> torch.Tensor:
    """Return the state [slots, vocab], grown if a slot is beyond it."""
    (size, vocab), needed = state.shape, 1 + int(slots.max(initial=0))
    if needed <= size:
        return state
    grown = state.new_zeros(max(needed, 2 * size), vocab)
    grown[:size] = state
    return grown
