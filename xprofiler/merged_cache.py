"""Merged KV blocks: how much longer an iteration takes over them than over the model's own blocks, on a CPU.

Two models that share a memory have merged blocks, in which a block of the smaller model leaves a gap (SeaLLM 4.4). The
gaps, and the distance between two layers' keys, change what the CPU's caches and address translation can hold.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from xcore.batching.shared_pool import block_of
from xcore.specs.schedule import BLOCK_SIZE
from xprofiler.points import TIMES_LARGER
from xprofiler.timing import Timing, cpu_clock
from xrunner.models import KVCache, Model
from xrunner.models.batch import Batch
from xrunner.models.cache import scattered_zeros
from xrunner.rank.warm_up import alike

_SEQUENCES, _CONTEXT = 8, 256
_TURNS = 12


def merged_ratio(model: Model) -> Timing:
    """Return the time of a decoding iteration over merged blocks, over that over the model's own blocks.

    `seconds` has the ratio. Iterations over both take turns. The shortest of each count: other work on the machine only
    makes them longer.
    """
    clocks = [cpu_clock(decoding(model, merged)) for merged in (False, True)]
    turns = np.array([[clock() for clock in clocks] for _ in range(_TURNS + 1)])[1:]
    low, median, high = np.percentile(turns[:, 1] / turns[:, 0], [25, 50, 75])
    own_s, merged_s = turns.min(axis=0).tolist()
    return Timing(merged_s / own_s, float((high - low) / median))


def decoding(model: Model, merged: bool) -> Callable[[], torch.Tensor]:
    """Return a call of a decoding iteration over own or merged blocks."""
    batch, cache = batch_and_cache(model, merged)
    return lambda: model.forward(batch, cache)


def batch_and_cache(model: Model, merged: bool) -> tuple[Batch, KVCache]:
    """Return decoding sequences whose blocks lie in random order, own or merged, and their cache."""
    context = min(_CONTEXT, model.spec.context)
    width, layers = -(-context // BLOCK_SIZE), model.cached_layers
    places = torch.randperm(_SEQUENCES * width).int().view(_SEQUENCES, width)
    if merged:
        spec = replace(model.share, layers=layers)
        block_bytes, pieces = block_of(spec, BLOCK_SIZE, model.kv_dtype)
        memory = scattered_zeros(((_SEQUENCES * width + 1) * TIMES_LARGER * block_bytes,), torch.uint8)
        memory.zero_()  # what was never written is one page of zeros, which stays in the CPU's caches
        cache, tables = KVCache.over(memory, spec, layers, BLOCK_SIZE, model.kv_dtype), places * TIMES_LARGER * pieces
    else:
        cache, tables = model.new_cache(_SEQUENCES * width + 1, BLOCK_SIZE), places
        cache.touch(_SEQUENCES * width)
    batch = alike(_SEQUENCES, 1, context, BLOCK_SIZE, None, width, model.device)
    slots = tables[:, -1].long() * BLOCK_SIZE + (context - 1) % BLOCK_SIZE
    return replace(batch, slots=slots, attention=(replace(batch.attention[0], tables=tables),)), cache
