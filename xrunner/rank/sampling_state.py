"""Sampling state: the tokens so far of each sequence with a repetition penalty, on the rank that samples.

A sequence has a slot, which is a row, from the beginning of its prefill to its end. The driver allocates slots and
sends only new tokens: the prompt with the sequence's first sampling, one output token with each later one.
"""

from collections.abc import Sequence

import numpy as np
import torch

from exegpt.kernels.sampling import Sampling

_SLOT = 6
"""Index of the slots among the arrays of a sampling."""


class Slots:
    """Allocation of slots, on the driver."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._count = 0

    def allocate(self) -> int:
        """A free slot: the one that was freed last, or a new one."""
        if self._free:
            return self._free.pop()
        self._count += 1
        return self._count - 1

    def free(self, slot: int) -> None:
        """Free a slot whose sequence has ended."""
        self._free.append(slot)


class SamplingState:
    """One byte per slot and token of the vocabulary, on the sampling rank; doubles when a slot is beyond it."""

    def __init__(self, vocab: int, device: torch.device):
        self.seen = torch.zeros(1, vocab, dtype=torch.uint8, device=device)
        """See `Sampling.seen`."""

    @torch.inference_mode()
    def sampling(self, arrays: Sequence[np.ndarray], tensors: Sequence[torch.Tensor]) -> Sampling:
        """A batch's sampling, after its new tokens are entered, from `DeviceBatch.sampling`'s arrays and the same as
        tensors on the device.
        """
        *rows, cleared, added = tensors
        self._reserve(1 + int(arrays[_SLOT].max(initial=0)))
        if len(cleared):
            self.seen.index_fill_(0, cleared, 0)
        if added.shape[1]:
            slots, tokens = added
            self.seen.view(-1).index_fill_(0, slots * self.seen.shape[1] + tokens, 1)
        return Sampling(*rows, self.seen)

    def _reserve(self, slots: int) -> None:
        """Grow to at least `slots` slots."""
        size, vocab = self.seen.shape
        if slots > size:
            seen = self.seen.new_zeros(max(slots, 2 * size), vocab)
            seen[:size] = self.seen
            self.seen = seen
