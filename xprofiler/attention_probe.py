"""Times of the attention kernel, over caches that are as cold as in a run."""

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import torch

from exegpt.kernels.attention import attention, make_work_list
from exegpt.kernels.attention_flashinfer import FlashInfer
from exegpt.kernels.kv_int8 import codes_and_scales
from xcore.specs.model import ModelSpec, usual_kv_dtype
from xcore.specs.schedule import BLOCK_SIZE
from xrunner.models.cache import KVCache
from xrunner.models.device import CPU, free_memory
from xrunner.models.weights import torch_dtype

if TYPE_CHECKING:
    from typing_extensions import Unpack


COLD_BYTES = 2**28
"""Most bytes of a pool that one call doesn't fill: more than most CPUs' caches."""


_STATES = 2
"""Queries and outputs that alternate.

So neither is in the caches nearest to the core, as after a layer's matrix products.
"""


class AttentionOptions(TypedDict, total=False):
    """Arguments of the attention kernel."""

    scale: float | None
    window: int | None
    causal: bool
    bias: torch.Tensor | None


def fill_randomly(keys: torch.Tensor, values: torch.Tensor) -> None:
    """Fill a layer's first block with random numbers of ordinary size, and copy it to all others."""
    for cache in (keys, values):
        block = cache[:1]
        block.random_(-127, 128) if cache.dtype == torch.int8 else block.normal_()
        cache[1:] = block
    if values.dtype == torch.int8:
        for _, scales in codes_and_scales(keys, values):
            scales.fill_(1 / 64)


class AttentionProbe:
    """Calls the attention kernel of one layer over a pool of at least `batch` sequences of `length` tokens.

    The pool has a `KVCache`'s memory layout, and its blocks follow each other as a `BlockPool` allocates them. Every
    call uses other blocks than the call before, as the next layer does: on a CPU, as many as there are layers. It reads
    queries and writes outputs with a layer's layout: queries next to keys and values, both outside the caches nearest
    to the core. `attention` and `kv_dtype` are as in `Model`.
    """

    def __init__(
        self,
        model: ModelSpec,
        batch: int,
        length: int,
        dtype: str = "fp32",
        device: torch.device = CPU,
        attention: str = "triton",
        kv_dtype: str | None = None,
    ):
        self.batch, self.length = batch, length
        kv_dtype = kv_dtype or usual_kv_dtype(dtype)
        block_bytes = BLOCK_SIZE * model.kv_bytes(1, kv_dtype)
        blocks = batch * -(-length // BLOCK_SIZE)
        cold = min(COLD_BYTES, free_memory(device) // 4) // block_bytes
        self._blocks = max(blocks, min(int(cold), blocks * model.layers) if device == CPU else int(cold))
        self._layers = model.layers if device == CPU else self._blocks
        self._heads, self._kv_heads = model.heads, model.kv_heads
        self._order = torch.arange(self._blocks, dtype=torch.int32, device=device)
        cache = KVCache.allocate(model, 1, self._blocks, BLOCK_SIZE, kv_dtype, device)
        self._keys, self._values = cache.keys[0], cache.values[0]
        fill_randomly(self._keys, self._values)
        self._dtype, self._head_size = torch_dtype(dtype), model.head_size
        self._workspace = FlashInfer.new_workspace(device) if attention == "flashinfer" else None

    def call(
        self, batch: int, new: int, past: int, **options: "Unpack[AttentionOptions]"
    ) -> Callable[[], torch.Tensor]:
        """Return a call of one layer's attention for `batch` sequences, with the kernel's `options`.

        Each sequence has `new` tokens after `past` cached ones.
        """
        width = -(-(past + new) // BLOCK_SIZE)
        blocks = batch * width
        layers = min(self._layers, self._blocks // blocks)
        tables = itertools.cycle(self._order[: layers * blocks].split(blocks))
        device, dtype, size = self._values.device, self._dtype, self._head_size
        all_heads = self._heads + 2 * self._kv_heads
        qkv = [torch.randn(batch * new, all_heads, size, dtype=dtype, device=device) for _ in range(_STATES)]
        outs = [torch.empty(batch * new, self._heads, size, dtype=dtype, device=device) for _ in range(_STATES)]
        states = itertools.cycle((rows[:, : self._heads], out) for rows, out in zip(qkv, outs, strict=True))
        offsets = torch.arange(0, batch * new + 1, new, dtype=torch.int32, device=device)
        contexts = torch.full((batch,), past + new, dtype=torch.int32, device=device)
        if self._workspace is not None:
            graph = (batch, blocks) if new == 1 else None  # decoding's plan is for graphs, as in a run
            plan = FlashInfer(self._heads, self._values, {options.get("window")}, self._workspace, graph=graph)
            table = next(tables).view(batch, width)
            plan.plan(table, offsets, contexts)
            firsts = itertools.cycle(range(0, layers * blocks, blocks))

            def attend_planned() -> torch.Tensor:
                """Compute attention by the plan for the first blocks, over another part of the pool each time."""
                begin, (q, out) = next(firsts), next(states)
                keys, values = (cache[begin : begin + blocks] for cache in (self._keys, self._values))
                attended: torch.Tensor = attention(q, keys, values, table, offsets, contexts, out, work=plan, **options)
                return attended

            return attend_planned
        work = None
        if new == 1 and options.get("causal", True) and "bias" not in options:  # a decoder-only model's, as in a run
            seq_lens = np.full(batch, past + new, dtype=np.int32)
            work = make_work_list(seq_lens, self._heads, self._values, options.get("window"))

        def attend() -> torch.Tensor:
            table, (q, out) = next(tables).view(batch, width), next(states)
            attended: torch.Tensor = attention(
                q, self._keys, self._values, table, offsets, contexts, out, work=work, **options
            )
            return attended

        return attend
