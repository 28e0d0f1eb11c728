"""CUDA graphs for decoding: a rank's layers of a decoding iteration as one call.

Without a graph, Python and some hundred launches would take longer than the GPU. On the sampling rank, final norm,
head and argmax are a second graph, skipped where tokens aren't all greedy.

A graph repeats the same kernels on the same tensors. So there are graphs and buffers for a few numbers of sequences.
A batch is padded to the next such number with sequences in a scratch block. Graphs are captured in the warm-up,
since capturing stops the device. Batches with prompts, or larger than the largest graph, run eagerly.
"""

import bisect
from collections.abc import Callable

import numpy as np
import torch

from xrunner.comm.gpu import Gpu
from xrunner.comm.packing import fill, packed_bytes, views
from xrunner.models import Dealing, KVCache, Model, Planning
from xrunner.models.weights import torch_dtype
from xrunner.rank.assembly import DeviceBatch

Feed = Callable[[DeviceBatch, torch.Tensor], object]

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Numbers of sequences for which there are graphs."""


class DecodeGraphs:
    """The graphs of one rank's layers over its cache, whose last block is the scratch block.

    `samples`: whether the rank samples tokens. `takes_states`: whether another stage is before this one. `planning`:
    FlashInfer's planning, where it computes attention.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        gpu: Gpu,
        samples: bool,
        takes_states: bool,
        planning: Planning | None = None,
    ):
        self._model, self._cache, self._gpu = model, cache, gpu
        self._samples, self._takes_states = samples, takes_states
        self._block_size, self._scratch = cache.values[0].shape[2], cache.last
        self._dealing, self._planning = Dealing.of(model, cache), planning
        self._width = 0
        self._graphs: dict[int, DecodeGraph] = {}

    def capture(self, sequences: int, width: int) -> None:
        """Capture the missing graphs for up to `sequences` sequences of up to `width` blocks."""
        if width > self._width:
            self._width = width
            self._graphs.clear()
            self._gpu.begin_graphs()
        for size in SIZES[: bisect.bisect_left(SIZES, sequences) + 1]:
            if size not in self._graphs:
                padding = self._padded(_empty(self._model), size)
                planning = self._planning.for_graph(size, size * self._width) if self._planning else None
                self._graphs[size] = DecodeGraph(
                    self._model, self._cache, self._gpu, padding, self._samples, self._takes_states, planning
                )

    def replay(self, batch: DeviceBatch, x: torch.Tensor | None, feed: Feed = lambda *_: None) -> "DecodeGraph | None":
        """Run this rank's layers for a batch by a graph; return the graph, or None if no graph fits.

        The graph's results are valid until the next batch. Rows beyond the batch's tokens are padding. `feed` writes
        tokens that aren't known on the host into its input.
        """
        index = bisect.bisect_left(SIZES, len(batch.tokens))
        graph = self._graphs.get(SIZES[index]) if batch.phase == "decode" and index < len(SIZES) else None
        if graph is None or batch.attention[0][2].shape[1] > self._width:
            return None
        graph.replay(self._padded(batch, graph.size), x, feed)
        return graph

    def _padded(self, batch: DeviceBatch, size: int) -> DeviceBatch:
        return batch.padded(size, self._width, self._scratch, self._block_size).with_work_lists(self._dealing)


class DecodeGraph:
    """The graphs for one number of sequences, with their buffers."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        gpu: Gpu,
        padding: DeviceBatch,
        samples: bool,
        takes_states: bool,
        planning: Planning | None,
    ):
        self.size = len(padding.tokens)
        self.states = torch.empty(0)
        """[size, hidden], after the layers."""
        self._tokens = torch.empty(0)
        self._gpu, self._planning = gpu, planning
        self._buffer = torch.empty(packed_bytes(padding.arrays), dtype=torch.uint8, device=model.device)
        tensors = padding.of_tensors(views(self._buffer, padding.arrays))
        self._input = tensors.tokens
        fill(self._buffer, padding.arrays, gpu)
        if planning:
            tensors = planning.planned(tensors, padding.attention)
        self._x: torch.Tensor | None = None
        if takes_states:
            kind = torch_dtype(model.dtype)
            self._x = torch.zeros(self.size, model.spec.hidden, dtype=kind, device=model.device)

        def compute() -> None:
            self.states = model.forward(tensors, cache, self._x)

        def sample() -> None:
            self._tokens = model.sample(self.states)

        self._compute = gpu.capture(compute)
        self._sample: Callable[[], None] | None = gpu.capture(sample) if samples else None

    def replay(self, batch: DeviceBatch, x: torch.Tensor | None, feed: Feed) -> None:
        """Compute the layers for a batch of this size from the states [rows, hidden] of the stage before."""
        fill(self._buffer, batch.arrays, self._gpu)
        feed(batch, self._input)
        if self._planning:
            self._planning.plan(batch.attention)
        if self._x is not None and x is not None:
            self._x[: len(x)].copy_(x)
        self._compute()

    def greedy_tokens(self) -> torch.Tensor:
        """Return the likeliest token after each of the states: int64 [size], valid until the next batch."""
        assert self._sample, "this rank doesn't sample"
        self._sample()
        return self._tokens


def _empty(model: Model) -> DeviceBatch:
    """Return a decoding batch without sequences."""
    none, empty = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)
    attention = (
        0,
        0,
        np.zeros((0, 1), dtype=np.int32),
        np.zeros(1, dtype=np.int32),
        *[empty] * (1 + bool(model.start)),
    )
    return DeviceBatch("decode", 0, 0, 0, none, none, none, (attention,), None, 0)
