"""Decoding by graphs: a rank's layers as one call for the whole of a decoding iteration, where Python and some hundred
launches would take longer than the GPU. Where the rank samples, final norm, head and greedy choice are another call
behind it, which rows that are sampled otherwise go without.

A graph repeats the same kernels on the same tensors. So there are two for each of a few numbers of sequences, with
buffers of their own; a piece is filled up to the next such number by sequences that lie in a block which is nobody's.
Graphs are made in the warm-up, since making one stops the device. Pieces with prompts, or larger than all graphs, go
without.
"""

import bisect
from collections.abc import Callable

import numpy as np
import torch

from exegpt.models import Dealing, KVCache, Model
from exegpt.models.weights import torch_dtype
from xrunner.comm.gpu import Gpu
from xrunner.comm.packing import fill, packed_bytes, views
from xrunner.rank.assembly import Work

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Numbers of sequences."""


class DecodeGraphs:
    """The graphs of one rank's layers over its cache, whose last block is nobody's. `samples` tells whether it chooses
    tokens, and `takes_states` whether another stage is before this one.
    """

    def __init__(self, model: Model, cache: KVCache, gpu: Gpu, samples: bool, takes_states: bool):
        self._model, self._cache, self._gpu = model, cache, gpu
        self._samples, self._takes_states = samples, takes_states
        blocks, _, self._block_size, _ = cache.values[0].shape
        self._scratch = blocks - 1
        self._dealing = Dealing.of(model, cache)
        self._width = 0
        self._graphs: dict[int, DecodeGraph] = {}

    def capture(self, sequences: int, width: int) -> None:
        """Make what there isn't yet for so many sequences at most, of so many blocks at most."""
        if width > self._width:
            self._width = width
            self._graphs.clear()
            self._gpu.begin_graphs()
        for size in SIZES[: bisect.bisect_left(SIZES, sequences) + 1]:
            if size not in self._graphs:
                given = self._padded(_nothing(self._model), size), self._samples, self._takes_states
                self._graphs[size] = DecodeGraph(self._model, self._cache, self._gpu, *given)

    def replay(self, work: Work, x: torch.Tensor | None) -> "DecodeGraph | None":
        """The graph that has computed this rank's layers for a piece, valid until the next piece; None where none takes
        it. Rows behind the piece's tokens are of those that fill up.
        """
        place = bisect.bisect_left(SIZES, len(work.tokens))
        graph = self._graphs.get(SIZES[place]) if work.phase == "decode" and place < len(SIZES) else None
        if graph is None or work.attention[0][2].shape[1] > self._width:
            return None
        graph.replay(self._padded(work, graph.size), x)
        return graph

    def _padded(self, work: Work, size: int) -> Work:
        return work.padded(size, self._width, self._scratch, self._block_size).dealt(self._dealing)


class DecodeGraph:
    """The graphs for one number of sequences, with their buffers."""

    def __init__(self, model: Model, cache: KVCache, gpu: Gpu, padding: Work, samples: bool, takes_states: bool):
        self.size = len(padding.tokens)
        self.states = torch.empty(0)
        """[size, hidden], after the layers"""
        self._tokens = torch.empty(0)
        self._gpu = gpu
        self._buffer = torch.empty(packed_bytes(padding.arrays), dtype=torch.uint8, device=model.device)
        batch = padding.batch_of(views(self._buffer, padding.arrays))
        fill(self._buffer, padding.arrays, gpu)
        self._x: torch.Tensor | None = None
        if takes_states:
            kind = torch_dtype(model.dtype)
            self._x = torch.zeros(self.size, model.spec.hidden, dtype=kind, device=model.device)

        def compute() -> None:
            self.states = model.forward(batch, cache, self._x)

        def choose() -> None:
            self._tokens = model.sample(self.states)

        self._compute = gpu.capture(compute)
        self._choose: Callable[[], None] | None = gpu.capture(choose) if samples else None

    def replay(self, work: Work, x: torch.Tensor | None) -> None:
        """Compute the layers for a piece of this size, of the states [rows, hidden] of the stage before."""
        fill(self._buffer, work.arrays, self._gpu)
        if self._x is not None and x is not None:
            self._x[: len(x)].copy_(x)
        self._compute()

    def greedy_tokens(self) -> torch.Tensor:
        """The likeliest token after each of the states: int64 [size], valid until the next piece."""
        assert self._choose, "this rank makes states"
        self._choose()
        return self._tokens


def _nothing(model: Model) -> Work:
    """A piece that decodes nobody."""
    none, some = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)
    attention = (0, 0, np.zeros((0, 1), dtype=np.int32), np.zeros(1, dtype=np.int32), *[some] * (1 + bool(model.start)))
    return Work("decode", 0, 0, 0, none, none, none, (attention,), None, 0)
