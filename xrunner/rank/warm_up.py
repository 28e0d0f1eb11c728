"""Warm-up: compile kernels, map memory and capture graphs before the run's clock starts."""

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np
import torch

from exegpt.kernels.argmax import NO_TOKEN
from exegpt.kernels.linear import can_tile
from exegpt.kernels.logit_edits import LogitEdits
from exegpt.kernels.sampling import Sampling
from exegpt.kernels.work_list import WorkList
from xcore.batching import BlockPool
from xcore.batching.admission import most_cached
from xcore.errors import InputError
from xcore.policies.from_schedule import most_prompts
from xcore.specs.schedule import Schedule
from xrunner.comm.gpu import Gpu
from xrunner.models import AttentionBatch, Batch, Dealing, EncoderDecoder, KVCache, Model, Planning, computed_rows
from xrunner.models.device import free_memory
from xrunner.models.weights import torch_dtype
from xrunner.rank.iteration_graphs import IterationGraphs

_SHAPES_S = 0.0 if os.environ.get("EXEGPT_WARM_UP") == "0" else 3.0
"""Longest time, in seconds, for the first calls of the matrix products by number of rows. Tests start many engines
with `EXEGPT_WARM_UP=0`.
"""
_MOST_ROWS = 1024
_TOUCHED_BYTES = 2**30
"""Most bytes of activations that are mapped before a run; less than what `keep_memory` keeps."""
_MOST_HEADS = 128
"""Rows of the head's warm-up: more sequences than that rarely get a token at once."""

_PROMPTS = (2, 4, 8, 16, 32, 64, 128)
"""Lengths of prompts for which a GPU's attention has separate tiles."""

_warm_rows: WeakKeyDictionary[Model, set[int]] = WeakKeyDictionary()
"""Numbers of rows with which a model's matrix products have run."""


@dataclass(frozen=True)
class Extent:
    """Upper limits on what a set of requests can use."""

    blocks: int
    """KV blocks"""
    tokens: int
    """Tokens computed in one iteration"""
    sequences: int
    """Sequences decoded in one iteration"""
    longest: int
    """KV blocks of one sequence"""
    prompts: int
    """Prompts prefilled in one iteration"""
    mixed_sequences: int = 0
    """Sequences decoded in an iteration with prompts"""

    @staticmethod
    def of(schedule: Schedule, sequences: Sequence[tuple[int, int]]) -> "Extent":
        """Return the extent of requests of these (prompt, output) lengths under a schedule."""
        pool = BlockPool(schedule.kv_blocks, schedule.block_size)
        start = bool(schedule.model.spec.encoder_layers)
        blocks = [pool.blocks_for(most_cached(prompt, output, start)) for prompt, output in sequences]
        resident = min(len(sequences), schedule.kv_blocks, schedule.control.of_kind("residents") or len(sequences))
        # A preempted request's output is prefilled with its prompt.
        prefilled = [prompt + (schedule.admission == "grow") * (output - 1) for prompt, output in sequences]
        tokens = computed_rows(_most_tokens(schedule, prefilled, resident))
        prompts = min(len(sequences), most_prompts(schedule) or resident)
        mixed = resident if schedule.traits.mixed else 0
        return Extent(min(pool.total, sum(blocks)), tokens, resident, max(blocks, default=1), prompts, mixed)

    @staticmethod
    def within(schedule: Schedule, input_tokens: int, max_output: int) -> "Extent":
        """Return the extent of any number of requests of at most these lengths.

        An engine that stays open needs it.
        """
        sequences = schedule.control.of_kind("residents") or schedule.kv_blocks
        return Extent.of(schedule, [(input_tokens, max_output)] * sequences)

    @staticmethod
    def unlimited(schedule: Schedule) -> "Extent":
        """Return the extent of any number of requests of any length that the model reads and its cache holds."""
        longest = schedule.model.spec.longest_request
        return Extent.within(schedule, (longest or schedule.kv_blocks * schedule.block_size) - 1, 1)


def _most_tokens(schedule: Schedule, prompts: Sequence[int], resident: int) -> int:
    budget = schedule.control.of_kind("tokens")
    if budget:
        return budget
    encoded = sum(sorted(prompts, reverse=True)[: most_prompts(schedule)])
    if schedule.model.spec.longest_request is None:  # then the cache limits what is encoded at once
        encoded = min(encoded, schedule.kv_blocks * schedule.block_size)
    return encoded + resident if schedule.traits.mixed else max(encoded, resident)


def warm_up(
    model: Model,
    cache: KVCache,
    extent: Extent,
    graphs: IterationGraphs | None = None,
    running: bool = False,
    gpu: Gpu | None = None,
    planning: Planning | None = None,
) -> None:
    """Run everything once that is slower the first time, on a cache without sequences.

    All ranks of a tensor-parallel group call it at once.

    On the CPU it compiles the attention kernels and maps the blocks and the activations that the run may use. It also
    runs oneDNN's matrix products with the numbers of rows of iterations, since oneDNN compiles each of them; products
    in tiles need none of it. On a GPU it compiles every variant of the kernels that the run may need and captures the
    graphs. If a run is `running` already, products and activations are left out: a warm-up of one number of rows takes
    longer than it saves. `planning` is this rank's planning, if FlashInfer computes attention.
    """
    cache.touch(extent.blocks)
    if graphs:  # first: capturing frees the memory that torch keeps for iterations
        graphs.capture(extent.sequences, extent.longest, extent.tokens, extent.prompts, extent.mixed_sequences)
    if model.device.type == "cpu":
        for new in (2, 1):
            _run_once(model, cache, 1, new, 1)
        if not running and not can_tile(torch_dtype(model.dtype)):
            _warm_up_rows(model, cache, extent)
        if not running:
            _touch_activations(model, extent.tokens)
    else:
        for sequences, new, width in _variants(extent):
            _run_once(model, cache, sequences, new, width, planning)
    cache.touch(1)
    if gpu:
        gpu.moment().synchronize()  # otherwise the first iteration would wait for all of this


def _variants(extent: Extent) -> Iterator[tuple[int, int, int]]:
    """Yield (sequences, new tokens of each, blocks of a table) for which a GPU compiles different kernels."""
    many = {2**i + 1 for i in range(6, (extent.prompts - 1).bit_length())}  # up to the next power of two; 1 up to 64
    widths = sorted({1, extent.longest})  # with a long table several programs share a sequence's keys
    yield from ((1, 1, width) for width in widths)
    for sequences, new, width in itertools.product(sorted({1} | many), _PROMPTS, widths):
        if sequences * (new // 2 + 1) <= max(
            extent.tokens, _PROMPTS[0]
        ):  # batches whose tokens per sequence can round up to `new`
            yield sequences, new, width
    if extent.tokens >= _MOST_ROWS:
        yield -(-_MOST_ROWS // _PROMPTS[-1]), _PROMPTS[-1], 1


def _run_once(
    model: Model, cache: KVCache, sequences: int, new: int, width: int, planning: Planning | None = None
) -> None:
    """Run one forward pass of equal sequences, `new` tokens each; skip it if it is too long.

    One token is sampled greedily, and again in every way that requests may ask for.
    """
    blocks, _, block_size, _ = cache.values[0].shape
    context = max(2, new)
    if context > min(block_size * blocks, model.spec.longest_request or context):
        return
    start = 1 if new == 1 and model.start and model.layers else None
    batch = alike(sequences, new, context, block_size, start, width, model.device, Dealing.of(model, cache))
    x = _forward(model, cache, batch, _states(model, sequences * new), planning)
    if model.head:
        model.next_tokens(x, replace(batch, rows=torch.zeros(1, dtype=torch.int64, device=model.device)))
        for sampling in _samplings(model):
            model.sample(x[:1], sampling)


def _forward(
    model: Model, cache: KVCache, batch: Batch, x: torch.Tensor | None, planning: Planning | None
) -> torch.Tensor:
    if planning:  # planning reads the tables, and so waits until earlier plans are computed
        batch = planning.planned(batch, batch.attention)
    return model.forward(batch, cache, x)


def check_logits(model: Model, cache: KVCache, embeds: bool, planning: Planning | None = None) -> dict[str, str]:
    """Check that a token can be sampled after one of two prompts, on a cache without sequences; return an empty dict.

    A stage that does not embed tokens gets states of zeros. A stage without a head must compute at least one finite
    value.
    All ranks of a tensor-parallel group call it at once.

    Raises:
        InputError: No token can be sampled.
    """
    usable = [_usable(model, cache, model.spec.vocab * place // 3, embeds, planning) for place in (1, 2)]
    cache.touch(1)
    if not any(usable):
        raise InputError(
            f"Model '{model.spec.name}' has NaN or infinite logits after every prompt of the warm-up. Its "
            f"weights are damaged or overflow in {model.dtype}: check the checkpoint, or pass another --dtype."
        )
    return {}


def _usable(model: Model, cache: KVCache, token: int, embeds: bool, planning: Planning | None) -> bool:
    """Return whether a stage's result after a prompt of one token, repeated if there is room, is usable.

    It must be a token; for a stage without a head, states with at least one finite value.
    """
    blocks, _, block_size, _ = cache.values[0].shape
    length = min(2, block_size * blocks - len(model.start), model.spec.context)
    if length < 1:
        return True
    passes: list[tuple[int, int, int | None]] = [(length, length, None)]
    if isinstance(model, EncoderDecoder) and model.layers:
        passes = passes * bool(model.encoder) + [(1, length + 1, length)]
    for new, context, start in passes:
        batch = alike(1, new, context, block_size, start, 1, model.device, Dealing.of(model, cache))
        batch = replace(batch, tokens=torch.full_like(batch.tokens, token))
        x = _forward(model, cache, batch, None if embeds else _states(model, new), planning)
    if model.head:
        return int(model.sample(x[-1:])) != NO_TOKEN
    return bool(x.isfinite().any())


def _warm_up_rows(model: Model, cache: KVCache, extent: Extent) -> None:
    """Run the matrix products with the iterations' numbers of rows, for at most `_SHAPES_S`."""
    began = time.perf_counter()
    for rows in sorted(
        {computed_rows(n) for n in range(2, min(extent.tokens, _MOST_ROWS) + 1)} - _warm_rows.setdefault(model, set())
    ):
        _products(model, cache, rows)
        _warm_rows[model].add(rows)
        late = torch.full((1, 1), float(time.perf_counter() - began > _SHAPES_S))
        if model.shard.all_reduce(late).item():  # all ranks of a group stop at the same number
            break


def alike(
    sequences: int,
    new: int,
    context: int,
    block_size: int,
    start: int | None,
    width: int,
    device: torch.device,
    dealing: Dealing | None = None,
) -> Batch:
    """Return a batch of equal sequences that share the blocks from 0 on, with tables of at least `width` blocks.

    Each has the last `new` of its `context` tokens. In an encoder-decoder's decoding the output's tokens begin at
    `start`.
    """
    blocks, tokens = -(-context // block_size), sequences * new
    tables = [[*range(blocks), *[0] * (width - blocks)]] * sequences
    arrays = [tables, [*range(0, tokens + 1, new)], [context] * sequences]
    arrays += [[start] * sequences] if start is not None else []
    work = None
    if dealing and new == 1:
        lists = dealing.deal(np.full(sequences, context, dtype=np.int32))
        work = WorkList(*(torch.from_numpy(array).to(device) for array in lists))
    tensors = (torch.tensor(a, dtype=torch.int32, device=device) for a in arrays)
    in_cache, offsets, contexts, *starts = tensors
    attention = AttentionBatch(0, tokens, in_cache, offsets, contexts, starts[0] if starts else None, work)
    positions = torch.arange(context - new, context, device=device).repeat(sequences)
    return Batch(torch.zeros_like(positions), positions, positions, (attention,), None)


def _samplings(model: Model) -> tuple[Sampling, Sampling]:
    """Return samplings of one row: one with temperature, top-k, top-p and penalty; one with min-p and all edits too."""
    device, vocab = model.device, model.spec.vocab
    temperature, top_p, penalty, log_min_p = (torch.full((1,), value, device=device) for value in (0.7, 0.9, 1.1, -3.0))
    top_k = torch.ones(1, dtype=torch.int32, device=device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    seen = torch.zeros(1, vocab, dtype=torch.uint8, device=device)
    plain = Sampling(temperature, top_k, top_p, penalty, zero, zero, zero, seen)
    allowed = torch.full((1, -(-vocab // 32)), -1, dtype=torch.int32, device=device)
    counts, biased = torch.zeros(1, vocab, dtype=torch.int32, device=device), zero.expand(2, 1)
    edits = LogitEdits(zero, penalty, penalty, penalty, zero, zero, allowed, biased, penalty, seen, counts)
    return plain, replace(plain, log_min_p=log_min_p, edits=edits)


@torch.inference_mode()
def _products(model: Model, cache: KVCache, rows: int) -> None:
    """Run the matrix products of one layer and of the head, for `rows` rows; other layers have the same shapes."""
    x, positions = _states(model, rows), torch.zeros(rows, dtype=torch.int64)
    layer = model.layers[0] if model.layers or not isinstance(model, EncoderDecoder) else model.encoder[0]
    slots = torch.zeros(1, dtype=torch.int64)
    q = layer.before_attention(x, positions, cache.keys[0], cache.values[0], slots)
    x = layer.after_attention(x, q.contiguous())
    if rows <= _MOST_HEADS and model.head:
        model.sample(x)


def _touch_activations(model: Model, rows: int) -> None:
    """Map the memory of the largest iteration's activations, which all iterations then reuse.

    Without it, a run's first prefill of 19,000 tokens took a third longer than the same prefill again.
    """
    spec, width = model.share, torch_dtype(model.dtype).itemsize
    each = 4 * spec.hidden + (spec.heads + 2 * spec.kv_heads) * spec.head_size
    most = min(_TOUCHED_BYTES, free_memory(model.device) // 8)  # ranks of a node share its memory
    torch.empty(min(rows * each * width, most), dtype=torch.uint8).zero_()


def _states(model: Model, rows: int) -> torch.Tensor:
    return torch.zeros(rows, model.spec.hidden, dtype=torch_dtype(model.dtype), device=model.device)
