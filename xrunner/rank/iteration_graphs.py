"""CUDA graphs: a rank's layers of an iteration as one call.

Without a graph, Python and some hundred launches would take longer than the GPU, unless there are thousands of tokens.
On the sampling rank, final norm, head and argmax are a second graph, skipped where tokens aren't all greedy.

A graph repeats the same kernels on the same tensors. So there are graphs and buffers for a few sizes. A decoding batch
is padded to the next number of sequences, with sequences in a scratch block. A batch with prompts is padded to the next
number of rows, with rows in the scratch block, and with sequences without tokens: the arrays say which rows are whose.
Block tables are as wide as the longest sequence; only what is used of them is copied, and only when it has changed.
Graphs are captured in the warm-up, since capturing stops the device. Batches larger than the largest graph run eagerly.
So do those with prompts of an encoder-decoder, and of FlashInfer's attention, whose plans differ in their launches.
"""

import bisect
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from exegpt.kernels.attention_flashinfer import most_planned
from xcore.arrays import Integers32, Numbers
from xrunner.comm.gpu import Gpu
from xrunner.comm.packing import fill, packed_bytes, send, views
from xrunner.models import AttentionArrays, Batch, Dealing, KVCache, Model, Planning
from xrunner.models.weights import torch_dtype
from xrunner.rank.assembly import DeviceBatch, MixedSize

Feed = Callable[[DeviceBatch, torch.Tensor], object]

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, *range(96, 256, 32), *range(256, 1024, 64), *range(1024, 2049, 128))
"""Numbers of sequences for which there are decoding graphs."""
ROWS = tuple(size for size in SIZES if size >= 16)
"""Numbers of rows for which there are graphs of batches with prompts."""
_PROMPTS, _ROWS_OF_A_PROMPT = 32, 16
"""Prompts of a graph at most, or one for so many rows if these are more: each of them adds programs of attention, which
most often find nothing to do."""


class IterationGraphs:
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
        self._decoding: dict[int, IterationGraph] = {}
        self._mixed: dict[MixedSize, IterationGraph] = {}
        """The graphs for batches with prompts, the fewest rows first."""

    def capture(self, sequences: int, width: int, rows: int = 0, prompts: int = 0, mixed_sequences: int = 0) -> None:
        """Capture the missing graphs for up to `sequences` decoding sequences of up to `width` blocks.

        Also those for batches of up to `rows` rows with up to `prompts` prompts, if there are any, and up to
        `mixed_sequences` decoding sequences. The largest comes first: the others' logits then fit in its memory.
        """
        if width > self._width:
            self._width = width
            self._decoding.clear()
            self._mixed.clear()
            self._gpu.begin_graphs()
        sizes = SIZES[: bisect.bisect_left(SIZES, sequences) + 1]
        for size in reversed(sizes):
            if size not in self._decoding and size <= self._most_planned:
                planning = self._planning.for_graph(size, size * self._width) if self._planning else None
                self._decoding[size] = self._captured(self._padded(_empty(self._model), size), planning)
        if prompts and self._planning is None and not self._model.spec.encoder_layers:
            self._capture_mixed(max(1, mixed_sequences), rows, prompts)

    @property
    def _most_planned(self) -> int:
        """The most sequences whose decoding FlashInfer can plan; without it, of the largest graph."""
        spec = self._model.share
        return SIZES[-1] if self._planning is None else most_planned(spec.heads, spec.kv_heads, spec.head_size)

    def _capture_mixed(self, sequences: int, rows: int, prompts: int) -> None:
        for size in self._mixed:  # those of an earlier schedule stay of use
            sequences, prompts, rows = max(sequences, size.sequences), max(prompts, size.prompts), max(rows, size.rows)
        sizes = {size.rows for size in self._mixed}.union(ROWS[: bisect.bisect_left(ROWS, rows) + 1])
        wanted = [
            MixedSize(
                size,
                min(prompts, max(_PROMPTS, size // _ROWS_OF_A_PROMPT), size - 1),
                min(sequences, size - 1),
                self._width,
            )
            for size in sorted(sizes, reverse=True)
        ]
        kept = {size: self._mixed.get(size) for size in wanted}
        made = {
            size: graph or self._captured(self._padded_mixed(_empty(self._model), size)) for size, graph in kept.items()
        }
        self._mixed = dict(reversed(made.items()))

    def _captured(self, padding: DeviceBatch, planning: Planning | None = None) -> "IterationGraph":
        tables = [self._wide_table(len(part.contexts)) for part in padding.attention]
        return IterationGraph(
            self._model, self._cache, self._gpu, padding, tables, self._samples, self._takes_states, planning
        )

    def _wide_table(self, sequences: int) -> torch.Tensor:
        """Return a block table of the scratch block: int32 [sequences, most blocks]."""
        return torch.full((sequences, self._width), self._scratch, dtype=torch.int32, device=self._model.device)

    def replay(
        self, batch: DeviceBatch, x: torch.Tensor | None, feed: Feed = lambda *_: None
    ) -> "IterationGraph | None":
        """Run this rank's layers for a batch by a graph; return the graph, or None if no graph fits.

        The graph's results are valid until the next batch. Rows beyond the batch's tokens are padding. `feed` writes
        tokens that aren't known on the host into its input.
        """
        if batch.phase == "decode":
            index = bisect.bisect_left(SIZES, len(batch.tokens))
            graph = self._decoding.get(SIZES[index]) if index < len(SIZES) else None
            tables = batch.tables[0]
            catches_up = len(tables) != batch.computed  # a preempted sequence computes several tokens
            if graph is None or tables.shape[1] > self._width or catches_up:
                return None
            graph.replay(self._padded(batch, graph.rows), x, feed)
            return graph
        size = next((size for size in self._mixed if size.holds(batch)), None)
        if size is None:
            return None
        graph = self._mixed[size]
        graph.replay(self._padded_mixed(batch, size), x, feed)
        return graph

    def _padded(self, batch: DeviceBatch, size: int) -> DeviceBatch:
        return batch.padded(size, self._scratch, self._block_size).with_work_lists(self._dealing)

    def _padded_mixed(self, batch: DeviceBatch, size: MixedSize) -> DeviceBatch:
        return batch.padded_mixed(size, self._scratch, self._block_size, self._dealing)


class IterationGraph:
    """The graphs for one size of batch, with their buffers."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        gpu: Gpu,
        padding: DeviceBatch,
        tables: list[torch.Tensor],
        samples: bool,
        takes_states: bool,
        planning: Planning | None,
    ):
        self.rows = len(padding.tokens)
        self.states = torch.empty(0)
        """[rows, hidden], after the layers."""
        self._tokens = torch.empty(0)
        self._gpu, self._planning, self._tables, self._uploaded = gpu, planning, tables, padding.tables
        arrays = _packed(padding)
        self._buffer = torch.empty(packed_bytes(arrays), dtype=torch.uint8, device=model.device)
        tensors = views(self._buffer, arrays)
        for place, table in zip(padding.table_places, tables, strict=True):
            tensors.insert(place, table)
        self.batch: Batch = padding.of_tensors(tensors)
        """The tensors that the graphs read."""
        fill(self._buffer, arrays, gpu)
        if planning:
            self.batch = planning.planned(self.batch, _plannable(padding))
        if len(padding.attention) > 1:  # its prompts may be of any lengths
            prompts, decoding = self.batch.attention
            self.batch = replace(
                self.batch, attention=(replace(prompts, max_query_len=self.rows), replace(decoding, max_query_len=1))
            )
        self._x: torch.Tensor | None = None
        if takes_states:
            kind = torch_dtype(model.dtype)
            self._x = torch.zeros(self.rows, model.spec.hidden, dtype=kind, device=model.device)

        def compute() -> None:
            self.states = model.forward(self.batch, cache, self._x)

        def sample() -> None:
            self._tokens = model.next_tokens(self.states, self.batch)

        self._compute = gpu.capture(compute)
        self._sample: Callable[[], None] | None = gpu.capture(sample) if samples else None

    def replay(self, batch: DeviceBatch, x: torch.Tensor | None, feed: Feed) -> None:
        """Compute the layers for a batch of this size from the states [rows, hidden] of the stage before."""
        fill(self._buffer, _packed(batch), self._gpu)
        self._upload(batch.tables)
        feed(batch, self.batch.tokens)
        if self._planning:
            self._planning.plan(_plannable(batch))
        if self._x is not None and x is not None:
            self._x[: len(x)].copy_(x)
        self._compute()

    def _upload(self, tables: list[Integers32]) -> None:
        """Copy the block tables that differ from those of the batch before.

        Rows below a table keep older blocks. Only padding sequences read them.
        """
        changed = [part for part, table in enumerate(tables) if table is not self._uploaded[part] and table.size]
        for part, table in zip(changed, send([tables[part] for part in changed], self._gpu), strict=True):
            self._tables[part][: table.shape[0], : table.shape[1]].copy_(table)
            self._uploaded[part] = tables[part]

    def greedy_tokens(self) -> torch.Tensor:
        """Return the likeliest token after each row that gets one, then padding: int64, until the next batch."""
        assert self._sample, "this graph doesn't sample"
        self._sample()
        return self._tokens


def _packed(padded: DeviceBatch) -> list[Numbers]:
    """Return the arrays of a padded batch, except the tables, that its graphs read in one buffer.

    A decoding batch's graph samples after all rows.
    """
    arrays, places = padded.forward_arrays, padded.table_places
    rows = [padded.rows] if len(places) > 1 and padded.rows is not None else []
    return [array for place, array in enumerate(arrays) if place not in places] + rows


def _plannable(padded: DeviceBatch) -> list[AttentionArrays]:
    """Return a padded decoding batch's attention with a row of the table for each padding sequence, too."""
    (part,) = padded.attention
    (rows, width) = part.tables.shape
    whole = np.zeros((len(part.contexts), max(1, width)), dtype=np.int32)
    whole[:rows, :width] = part.tables
    return [replace(part, tables=whole)]


def _empty(model: Model) -> DeviceBatch:
    """Return a decoding batch without sequences."""
    none, empty = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)
    starts = empty if model.start else None
    attention = AttentionArrays(0, 0, np.zeros((0, 1), np.int32), np.zeros(1, np.int32), empty, starts)
    return DeviceBatch("decode", 0, 0, 0, none, none, none, (attention,), None, 0)
