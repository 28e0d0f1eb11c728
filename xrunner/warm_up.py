"""Warm-up: compile, map memory and pick kernels before the clock starts."""

import time
from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch

from exegpt.models import AttentionBatch, Batch, KVCache, Model, computed_rows
from exegpt.policies import BlockPool, Sequence

_SHAPES_S = 3.0
"""Seconds at most for the first calls of the matrix products by number of rows."""
_MOST_ROWS = 1024
_MOST_HEADS = 128
"""More sequences than that rarely get a token at once."""

_seen: WeakKeyDictionary[Model, set[int]] = WeakKeyDictionary()
"""Numbers of rows that a model's products have had."""


def warm_up(model: Model, cache: KVCache, pool: BlockPool, sequences: Iterable[Sequence]) -> None:
    """Do everything once that is slower the first time, on a cache that nobody holds.

    The attention kernels are compiled, the blocks that these sequences can come to use are mapped, and oneDNN's
    products, which are generated anew for every number of rows, see the numbers that iterations will have.
    """
    sequences = list(sequences)
    counts = [pool.blocks_for(sequence.tokens_needed) for sequence in sequences]
    cache.touch(min(pool.total, sum(counts)))
    for new, context in ((2, 2), (1, 2)):
        if context <= min(pool.block_size * pool.total, model.spec.context):
            model.step(one_sequence(new, context, pool.block_size), cache)
    most = sum(sequence.input_tokens for sequence in sequences) + len(sequences)
    began = time.perf_counter()
    for rows in sorted(
        {computed_rows(n) for n in range(2, min(most, _MOST_ROWS) + 1)} - _seen.setdefault(model, set())
    ):
        _products(model, rows)
        _seen[model].add(rows)
        if time.perf_counter() - began > _SHAPES_S:
            break
    cache.touch(1)


def one_sequence(new: int, context: int, block_size: int) -> Batch:
    """A batch of one sequence in block 0 and following, whose last `new` of `context` tokens are computed."""
    positions = torch.arange(context - new, context)
    attention = AttentionBatch(
        0,
        new,
        torch.arange(-(-context // block_size), dtype=torch.int32).unsqueeze(0),
        torch.tensor([0, new], dtype=torch.int32),
        torch.tensor([context], dtype=torch.int32),
    )
    return Batch(torch.zeros(new, dtype=torch.int64), positions, positions, (attention,), None)


@torch.inference_mode()
def _products(model: Model, rows: int) -> None:
    """One layer's products, and the head's, for a number of rows; other layers have the same shapes."""
    x = model.ends.embed(torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64))
    q, _, _ = model.layers[0].before_attention(x, torch.zeros(rows, dtype=torch.int64))
    x = model.layers[0].after_attention(x, q.contiguous())
    if rows <= _MOST_HEADS:
        model.sample(x)
