"""The attention kernel alone, over caches as cold as the runner finds them."""

import itertools
from collections.abc import Callable
from typing import Any

import torch

from exegpt.kernels.attention import attention
from exegpt.model import ModelSpec
from exegpt.models.device import PROCESSOR
from exegpt.schedule import BLOCK_SIZE

COLD_BYTES = 2**28
"""A pool of this size outgrows the processor's caches: between two visits of one layer's cache the runner reads all
the weights, so a block is never still there."""


_LAYERS = 2
"""Layers whose queries and outputs take turns: the kernel finds neither in the first caches, as after a layer's
products."""


class AttentionProbe:
    """Calls the attention kernel of one layer over scattered blocks of a pool that holds `batch` sequences of `length`
    tokens, or more. Every call takes other blocks than the one before, and reads queries and writes outputs that lie
    as they do in a layer: queries beside keys and values, both out of the nearest caches.
    """

    def __init__(
        self,
        model: ModelSpec,
        batch: int,
        length: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device = PROCESSOR,
    ):
        block_bytes = 2 * model.kv_heads * model.head_size * dtype.itemsize * BLOCK_SIZE
        self._blocks = max(batch * -(-length // BLOCK_SIZE), COLD_BYTES // block_bytes)
        self._heads, self._kv_heads = model.heads, model.kv_heads
        self._order = torch.randperm(self._blocks, dtype=torch.int32).to(device)
        there = {"dtype": dtype, "device": device}
        self._keys = torch.randn(self._blocks, model.kv_heads, model.head_size, BLOCK_SIZE, **there)
        self._values = torch.randn(self._blocks, model.kv_heads, BLOCK_SIZE, model.head_size, **there)

    def call(self, batch: int, new: int, past: int, **options: Any) -> Callable[[], torch.Tensor]:
        """One layer's attention for `batch` sequences, each with `new` tokens after `past` cached ones, with options of
        the kernel.
        """
        width = -(-(past + new) // BLOCK_SIZE)
        tables = itertools.cycle(self._order[: self._blocks // (batch * width) * batch * width].split(batch * width))
        device, there = self._values.device, {"dtype": self._values.dtype, "device": self._values.device}
        size = self._values.shape[-1]
        qkv = [torch.randn(batch * new, self._heads + 2 * self._kv_heads, size, **there) for _ in range(_LAYERS)]
        outs = [torch.empty(batch * new, self._heads, size, **there) for _ in range(_LAYERS)]
        layers = itertools.cycle((rows[:, : self._heads], out) for rows, out in zip(qkv, outs, strict=True))
        offsets = torch.arange(0, batch * new + 1, new, dtype=torch.int32, device=device)
        contexts = torch.full((batch,), past + new, dtype=torch.int32, device=device)

        def attend() -> torch.Tensor:
            table, (q, out) = next(tables).view(batch, width), next(layers)
            return attention(q, self._keys, self._values, table, offsets, contexts, out, **options)

        return attend
