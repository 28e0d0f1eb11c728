"""Weights of 8 or 4 bits in groups of inputs that share a scale: their codes, and rounding to the nearest code."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

LONGEST_GROUP = 128
"""Inputs of a group at most: longer ones are kept as several groups of the same scale."""


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [outputs, inputs]: (code - zero) · scale of the output's group of inputs."""

    codes: torch.Tensor
    """int8 [outputs, inputs], signed. Column j is input order[j]."""
    scales: torch.Tensor
    """float32 [outputs, groups]."""
    zeros: torch.Tensor | None
    """int16 [outputs, groups]; None: all are zero."""
    bits: int
    """8 or 4."""
    group_size: int
    """Columns of a group, an even number; the last group may have fewer."""
    order: torch.Tensor | None = None
    """int64 [inputs]: the input of each column; None: in order."""

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.codes.shape[0], self.codes.shape[1]

    def part(self, axis: int, start: int, size: int) -> "QuantizedWeight":
        """Return `size` outputs (axis 0) or inputs (axis 1) from `start` on.

        Raises:
            ValueError: The inputs don't begin with a group, or groups are not of neighbouring inputs.
        """
        if axis == 0:
            zeros = None if self.zeros is None else self.zeros[start : start + size]
            scales = self.scales[start : start + size]
            return replace(self, codes=self.codes[start : start + size], scales=scales, zeros=zeros)
        one_group = self.scales.shape[1] == 1
        if self.order is not None or (start % self.group_size and not one_group):
            raise ValueError(f"groups of {self.group_size} inputs can't be split at input {start}")
        if one_group:
            return replace(self, codes=self.codes[:, start : start + size])
        groups = slice(start // self.group_size, -(-(start + size) // self.group_size))
        zeros = None if self.zeros is None else self.zeros[:, groups]
        return replace(self, codes=self.codes[:, start : start + size], scales=self.scales[:, groups], zeros=zeros)

    def with_short_groups(self) -> "QuantizedWeight":
        """Return the same weight with groups of at most `LONGEST_GROUP` inputs, for buffers in the first caches."""
        if self.group_size <= LONGEST_GROUP:
            return self
        divisors = (size for size in range(LONGEST_GROUP, 1, -2) if self.group_size % size == 0)
        size = LONGEST_GROUP if self.scales.shape[1] == 1 else next(divisors)
        times, groups = -(-self.group_size // size), -(-self.shape[1] // size)

        def repeated(values: torch.Tensor) -> torch.Tensor:
            return values.repeat_interleave(times, 1)[:, :groups]

        zeros = None if self.zeros is None else repeated(self.zeros)
        return replace(self, scales=repeated(self.scales), zeros=zeros, group_size=size)

    def dequantized(self) -> torch.Tensor:
        """Return the weight in float32, [outputs, inputs]: the reference for products."""

        def spread(values: torch.Tensor) -> torch.Tensor:
            return values.float().repeat_interleave(self.group_size, 1)[:, : self.shape[1]]

        codes = self.codes.float() if self.zeros is None else self.codes - spread(self.zeros)
        weight = codes * spread(self.scales)
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order, weight)


def side_by_side(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Return a weight with the outputs of all; None if they differ in bits, groups or order."""
    first = weights[0]
    for other in weights[1:]:
        ordered = first.order is not None and other.order is not None and torch.equal(first.order, other.order)
        alike = (first.bits, first.group_size) == (other.bits, other.group_size)
        if not alike or not (ordered or first.order is other.order is None):
            return None
    zeros = None
    if any(weight.zeros is not None for weight in weights):
        every = [torch.zeros_like(w.scales, dtype=torch.int16) if w.zeros is None else w.zeros for w in weights]
        zeros = torch.cat(every)
    codes, scales = torch.cat([w.codes for w in weights]), torch.cat([w.scales for w in weights])
    return replace(first, codes=codes, scales=scales, zeros=zeros)


def rounded_to_nearest(weight: torch.Tensor, bits: int, group_size: int) -> QuantizedWeight:
    """Round a weight [outputs, inputs] to symmetric codes; the largest of a group decides its scale.

    The scale is float16's, as in files, and a group of zeros has the scale 1. `group_size` is at most the inputs.
    """
    outputs, inputs = weight.shape
    grouped = F.pad(weight.float(), (0, -inputs % group_size)).view(outputs, -1, group_size)
    largest, most = grouped.abs().amax(-1), 2 ** (bits - 1) - 1
    scales = (largest / most).half().float()
    scales = torch.where(scales == 0, 1.0, scales)
    codes = (grouped / scales[..., None]).round().clamp(-most - 1, most).to(torch.int8)
    return QuantizedWeight(codes.view(outputs, -1)[:, :inputs].contiguous(), scales, None, bits, group_size)
