"""Warm-up: compile, map memory and pick kernels before the clock starts."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from exegpt.kernels.sampling import Sampling
from exegpt.models import AttentionBatch, Batch, EncoderDecoder, KVCache, Model, computed_rows
from exegpt.models.weights import torch_dtype
from exegpt.policies import BlockPool
from exegpt.schedule import Schedule
from xrunner.decode_graphs import DecodeGraphs

_SHAPES_S = 3.0
"""Seconds at most for the first calls of the matrix products by number of rows."""
_MOST_ROWS = 1024
_MOST_HEADS = 128
"""More sequences than that rarely get a token at once."""

_PROMPTS = (2, 4, 8, 16, 32, 64, 128)
"""Lengths of prompts for which a GPU's attention has tiles of their own."""

_seen: WeakKeyDictionary[Model, set[int]] = WeakKeyDictionary()
"""Numbers of rows that a model's products have had."""


@dataclass(frozen=True)
class Extent:
    """What some requests can come to use at most."""

    blocks: int
    """KV blocks"""
    tokens: int
    """computed in one iteration"""
    sequences: int
    """decoded in one iteration"""
    longest: int
    """KV blocks of one sequence"""

    @staticmethod
    def of(schedule: Schedule, sequences: Sequence[tuple[int, int]]) -> "Extent":
        """The extent of requests of these (prompt, output) lengths under a schedule."""
        pool = BlockPool(schedule.kv_blocks, schedule.block_size)
        start = bool(schedule.model.spec.encoder_layers)
        blocks = [pool.blocks_for(prompt + output - 1 + start) for prompt, output in sequences]
        resident = min(len(sequences), schedule.kv_blocks, schedule.max_num_seqs or len(sequences))
        tokens = computed_rows(_most_tokens(schedule, [prompt for prompt, _ in sequences], resident))
        return Extent(min(pool.total, sum(blocks)), tokens, resident, max(blocks, default=1))


def _most_tokens(schedule: Schedule, prompts: Sequence[int], resident: int) -> int:
    if schedule.max_num_batched_tokens:
        return schedule.max_num_batched_tokens
    together = schedule.encode_batch or schedule.prefills_per_step or 0
    encoded = sum(sorted(prompts, reverse=True)[:together])
    return encoded + resident if schedule.policy == "orca" else max(encoded, resident)


def warm_up(
    model: Model, cache: KVCache, extent: Extent, graphs: DecodeGraphs | None = None, running: bool = False
) -> None:
    """Do everything once that is slower the first time, on a cache that nobody holds. All ranks of a tensor-parallel
    group call it at once.

    On the processor the attention kernels are compiled, the blocks that the run can come to use are mapped, and
    oneDNN's products, which are generated anew for every number of rows, see the numbers that iterations will have. On
    a GPU every form of the kernels is compiled that the run can come to need, and decoding's graphs are made. Where a
    run is `running` already, products are left out: to see a number of rows takes longer than what it saves.
    """
    cache.touch(extent.blocks)
    if model.device.type == "cpu":
        _run_once(model, cache, (2, 1), 1)
        if not running:
            _see_rows(model, cache, extent)
    else:
        for width in sorted({1, extent.longest}):  # a long table is dealt to several programs
            _run_once(model, cache, (*_PROMPTS, 1), width)
    if graphs:
        graphs.capture(extent.sequences, extent.longest)
    cache.touch(1)


def _run_once(model: Model, cache: KVCache, counts: Sequence[int], width: int) -> None:
    """Compute one sequence's so many last tokens, greedily and by chance."""
    blocks, _, block_size, _ = cache.values[0].shape
    for new in counts:
        context = max(2, new)
        if context > min(block_size * blocks, model.spec.context):
            continue
        start = 1 if new == 1 and model.start and model.layers else None
        batch = one_sequence(new, context, block_size, start, width, model.device)
        x = model.forward(batch, cache, _states(model, new))
        if model.head:
            model.sample(x)
            model.sample(x[:1], _by_chance(model.device))


def _see_rows(model: Model, cache: KVCache, extent: Extent) -> None:
    """Let the products see the numbers of rows of iterations, for some seconds at most."""
    began = time.perf_counter()
    for rows in sorted(
        {computed_rows(n) for n in range(2, min(extent.tokens, _MOST_ROWS) + 1)} - _seen.setdefault(model, set())
    ):
        _products(model, cache, rows)
        _seen[model].add(rows)
        late = torch.full((1, 1), float(time.perf_counter() - began > _SHAPES_S))
        if model.shard.all_reduce(late).item():  # what one rank of a group leaves out, all do
            break


def one_sequence(new: int, context: int, block_size: int, start: int | None, width: int, device: torch.device) -> Batch:
    """A batch of one sequence in block 0 and following, whose last `new` of `context` tokens are computed, with a table
    of `width` blocks at least. Where an encoder-decoder decodes, those of its output begin at `start`.
    """
    blocks = -(-context // block_size)
    table = [*range(blocks), *[0] * (width - blocks)]
    arrays = [table], [0, new], [context], *([[start]] if start is not None else [])
    attention = AttentionBatch(0, new, *(torch.tensor(a, dtype=torch.int32, device=device) for a in arrays))
    positions = torch.arange(context - new, context, device=device)
    return Batch(torch.zeros_like(positions), positions, positions, (attention,), None)


def _by_chance(device: torch.device) -> Sampling:
    """One row's, which uses all there is."""
    floats = (torch.full((1,), value, device=device) for value in (0.7, 0.9, 1.1))
    temperature, top_p, penalty = floats
    top_k = torch.ones(1, dtype=torch.int32, device=device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return Sampling(temperature, top_k, top_p, penalty, zero, zero, zero.unsqueeze(1))


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
    return torch.zeros(rows, model.spec.hidden, dtype=torch_dtype(model.dtype), device=model.device)
