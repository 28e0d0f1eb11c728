"""Warm-up: compile, map memory and pick kernels before the clock starts."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from exegpt.models import AttentionBatch, Batch, EncoderDecoder, KVCache, Model, computed_rows
from exegpt.models.weights import torch_dtype
from exegpt.policies import BlockPool
from exegpt.schedule import Schedule

_SHAPES_S = 3.0
"""Seconds at most for the first calls of the matrix products by number of rows."""
_MOST_ROWS = 1024
_MOST_HEADS = 128
"""More sequences than that rarely get a token at once."""

_seen: WeakKeyDictionary[Model, set[int]] = WeakKeyDictionary()
"""Numbers of rows that a model's products have had."""


@dataclass(frozen=True)
class Extent:
    """What some requests can come to use at most."""

    blocks: int
    """KV blocks"""
    tokens: int
    """computed in one iteration"""

    @staticmethod
    def of(schedule: Schedule, sequences: Sequence[tuple[int, int]]) -> "Extent":
        """The extent of requests of these (prompt, output) lengths under a schedule."""
        pool = BlockPool(schedule.kv_blocks, schedule.block_size)
        blocks = sum(pool.blocks_for(prompt + output - 1) for prompt, output in sequences)
        return Extent(
            min(pool.total, blocks), computed_rows(_most_tokens(schedule, [prompt for prompt, _ in sequences]))
        )


def _most_tokens(schedule: Schedule, prompts: Sequence[int]) -> int:
    if schedule.max_num_batched_tokens:
        return schedule.max_num_batched_tokens
    together = schedule.encode_batch or schedule.prefills_per_step or 0
    encoded = sum(sorted(prompts, reverse=True)[:together])
    resident = min(len(prompts), schedule.kv_blocks, schedule.max_num_seqs or len(prompts))
    return encoded + resident if schedule.policy == "orca" else max(encoded, resident)


def warm_up(model: Model, cache: KVCache, extent: Extent) -> None:
    """Do everything once that is slower the first time, on a cache that nobody holds. All ranks of a tensor-parallel
    group call it at once.

    The attention kernels are compiled, the blocks that the run can come to use are mapped, and oneDNN's products, which
    are generated anew for every number of rows, see the numbers that iterations will have.
    """
    cache.touch(extent.blocks)
    blocks, _, block_size, _ = cache.values[0].shape
    for new, context in ((2, 2), (1, 2)):
        if context <= min(block_size * blocks, model.spec.context):
            start = 1 if new == 1 and model.start and model.layers else None
            x = model.forward(one_sequence(new, context, block_size, start), cache, _states(model, new))
            if model.head:
                model.sample(x)
    began = time.perf_counter()
    for rows in sorted(
        {computed_rows(n) for n in range(2, min(extent.tokens, _MOST_ROWS) + 1)} - _seen.setdefault(model, set())
    ):
        _products(model, cache, rows)
        _seen[model].add(rows)
        late = torch.full((1, 1), float(time.perf_counter() - began > _SHAPES_S))
        if model.shard.all_reduce(late).item():  # what one rank of a group leaves out, all do
            break
    cache.touch(1)


def one_sequence(new: int, context: int, block_size: int, start: int | None = None) -> Batch:
    """A batch of one sequence in block 0 and following, whose last `new` of `context` tokens are computed. Where an
    encoder-decoder decodes, those of its output begin at `start`.
    """
    positions = torch.arange(context - new, context)
    attention = AttentionBatch(
        0,
        new,
        torch.arange(-(-context // block_size), dtype=torch.int32).unsqueeze(0),
        torch.tensor([0, new], dtype=torch.int32),
        torch.tensor([context], dtype=torch.int32),
        None if start is None else torch.tensor([start], dtype=torch.int32),
    )
    return Batch(torch.zeros(new, dtype=torch.int64), positions, positions, (attention,), None)


@torch.inference_mode()
def _products(model: Model, cache: KVCache, rows: int) -> None:
    """One layer's products, and the head's, for a number of rows; other layers have the same shapes."""
    x, positions = _states(model, rows), torch.zeros(rows, dtype=torch.int64)
    layer = model.layers[0] if model.layers or not isinstance(model, EncoderDecoder) else model.encoder[0]
    slots = torch.zeros(1, dtype=torch.int64)
    q = layer.before_attention(x, positions, cache.keys[0], cache.values[0], slots)
    x = layer.after_attention(x, q.contiguous())
    if rows <= _MOST_HEADS and model.head:
        model.sample(x)


def _states(model: Model, rows: int) -> torch.Tensor:
    return torch.zeros(rows, model.spec.hidden, dtype=torch_dtype(model.dtype))
