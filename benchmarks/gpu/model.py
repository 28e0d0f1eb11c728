"""A whole model's decoding iteration on this device, by a graph and without, beside the roofline."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.kernels.timing import Roofline
from xcore.specs.model import BYTES, ModelSpec
from xcore.specs.schedule import BLOCK_SIZE
from xrunner.comm.gpu import Gpu
from xrunner.models import AttentionArrays, random_model
from xrunner.models.device import free_memory
from xrunner.rank.assembly import DeviceBatch
from xrunner.rank.compute import Compute

_STEPS = 21


@dataclass(frozen=True)
class Step:
    """One decoding iteration of a model, from its tokens on the host to the next ones there, in seconds."""

    model: str
    batch: int
    context: int
    eager: float
    graph: float
    bound: float
    """Of the roofline."""
    alike: bool
    """Whether both give the same tokens."""
    attention: str = "triton"
    """As in `Model`."""


def time_step(
    spec: ModelSpec,
    dtype: str,
    batch: int,
    context: int,
    gpu: Gpu,
    roofline: Roofline,
    report: Callable[[str], object],
    attention: str = "triton",
) -> Step | None:
    """Draw a model's weights on the device and decode `batch` sequences of `context` tokens once, again and again; None
    where the device has no memory for it.
    """
    need = 1.2 * spec.parameters * BYTES[dtype] + batch * context * spec.layers * spec.kv_bytes(1, dtype) + 4 * 2**30
    if need > free_memory(gpu.device):
        report(f"left out for lack of memory: {spec.name}, which needs {need / 2**30:.0f} GiB")
        return None
    model = random_model(spec, dtype=dtype, device=gpu.device, attention=attention)
    device_batch = decoding(spec, batch, context)
    cache = model.new_cache(device_batch.attention[0].tables.size + 1, BLOCK_SIZE)
    eager, graph = (Compute(model, cache, True, gpu, graphs) for graphs in (False, True))
    assert graph.graphs
    graph.graphs.capture(batch, device_batch.attention[0].tables.shape[1])
    slow, plain = _timed(lambda: eager(device_batch, None)[1])
    fast, replayed = _timed(lambda: graph(device_batch, None)[1])
    least = bound(spec, dtype, batch, context, roofline)
    return Step(spec.name, batch, context, slow, fast, least, plain == replayed, attention)


def _timed(call: Callable[[], torch.Tensor | None]) -> tuple[float, list[int]]:
    """Median seconds of a call, and the tokens that it gave."""
    for _ in range(3):
        tokens = call()
    times = []
    for _ in range(_STEPS):
        start = time.perf_counter()
        tokens = call()
        times.append(time.perf_counter() - start)
    assert tokens is not None
    return statistics.median(times), tokens.tolist()


def bound(spec: ModelSpec, dtype: str, batch: int, context: int, roofline: Roofline) -> float:
    """Seconds that a decoding iteration takes at least: all weights but the embedding's and all keys and values are
    read once, and multiplied.
    """
    weights = spec.parameters - (0 if spec.tied_embeddings else spec.vocab * spec.hidden)
    moved = weights * BYTES[dtype] + batch * context * spec.layers * spec.kv_bytes(1, dtype)
    flops = batch * (2 * weights + 4 * context * spec.heads * spec.head_size * spec.layers)
    return max(moved / roofline.reading, flops / roofline.rate)


def decoding(spec: ModelSpec, batch: int, context: int) -> DeviceBatch:
    """A device batch that decodes `batch` sequences, each with `context` tokens after it, in blocks of their own."""
    rng, each = np.random.default_rng(0), -(-context // BLOCK_SIZE)
    tables = rng.permutation(batch * each).astype(np.int32).reshape(batch, each)
    place = context - 1
    contexts, offsets = np.full(batch, context, dtype=np.int32), np.arange(batch + 1, dtype=np.int32)
    return DeviceBatch(
        phase="decode",
        micro_batch=0,
        sequences=batch,
        computed=batch,
        tokens=rng.integers(spec.vocab, size=batch),
        positions=np.full(batch, place),
        slots=tables[:, place // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + place % BLOCK_SIZE,
        attention=(AttentionArrays(0, batch, tables, offsets, contexts),),
        rows=None,
        new_tokens=batch,
    )
