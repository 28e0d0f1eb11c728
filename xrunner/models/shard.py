"""Shard: one device's share of every layer under tensor parallelism.

Heads and the feed-forward's width are split: the matrices that produce them by outputs, those that consume them by
inputs. A shard's contribution to the hidden states is then a partial sum; the all-reduce gives the layer's output.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from exegpt.kernels.quantized_weight import QuantizedWeight
from xcore.errors import InputError
from xcore.specs.model import ModelSpec

AllReduce = Callable[[torch.Tensor], torch.Tensor]
"""Sums [tokens, hidden] over the shards, on all of them; may overwrite its argument."""


@dataclass(frozen=True)
class Shard:
    """Shard number `rank` of `of` shards.

    The embedding and the head are not split: every shard has all of them.
    """

    rank: int
    of: int
    """The tensor-parallel degree."""
    all_reduce: AllReduce

    def share(self, spec: ModelSpec) -> ModelSpec:
        """Return the sizes of a shard. With fewer KV heads than shards, several shards have a copy of one.

        Raises:
            InputError: The model can't be split into this many shards.
        """
        if self.of not in spec.tp_degrees(self.of):
            possible = ", ".join(map(str, spec.tp_degrees(spec.heads)))
            raise InputError(f"Model '{spec.name}' can't be split into {self.of} shards, only into {possible}.")
        kv_heads = max(1, spec.kv_heads // self.of)
        return replace(spec, heads=spec.heads // self.of, kv_heads=kv_heads, ffn=spec.ffn // self.of)

    def cut(self, tensor: torch.Tensor, shape: tuple[int, ...], side_by_side: int = 1) -> torch.Tensor:
        """Return this shard's part, of shape `shape`, along the axis where the shapes differ.

        If no axis differs, return the tensor itself. If the tensor has `side_by_side` matrices (query, key and value),
        the result has the same part of each.
        """
        for axis, (full, part) in enumerate(zip(tensor.shape, shape, strict=True)):
            if full != part:
                full, part = full // side_by_side, part // side_by_side
                start = self.rank * full // self.of // part * part
                parts: torch.Tensor = tensor.unflatten(axis, (side_by_side, full)).narrow(axis + 1, start, part)
                return parts.flatten(axis, axis + 1).contiguous()
        return tensor

    def cut_matrix(
        self, matrix: torch.Tensor | QuantizedWeight, shape: tuple[int, ...]
    ) -> torch.Tensor | QuantizedWeight:
        """Return this shard's part of a matrix, of shape `shape`, as `cut`.

        Raises:
            InputError: The part has no whole groups of quantised weights.
        """
        if isinstance(matrix, torch.Tensor):
            return self.cut(matrix, shape)
        for axis, (full, part) in enumerate(zip(matrix.shape, shape, strict=True)):
            if full != part:
                try:
                    if axis == 1:
                        matrix.part(axis, part, full - part)  # so that all shards can be cut, or none
                    return matrix.part(axis, self.rank * full // self.of // part * part, part)
                except ValueError as error:
                    raise InputError(f"Quantised weights can't be split into {self.of} shards: {error}.") from None
        return matrix

    def once(self, term: torch.Tensor) -> torch.Tensor | None:
        """Return `term` on the first shard, else None: a bias or the residual, which must count once in the sum."""
        return term if self.rank == 0 else None


WHOLE = Shard(0, 1, lambda x: x)
"""The only shard of an unsplit model."""
