"""Assembly: from a piece of a policy's step to the tensors of one iteration, without padding."""

import itertools
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from exegpt.kernels.work_list import WorkList
from exegpt.models import AttentionBatch, Batch, Dealing, computed_rows
from exegpt.policies import Piece, Sequence
from exegpt.request import Request
from exegpt.timeline import Phase
from xrunner.comm.gpu import Gpu
from xrunner.comm.packing import send
from xrunner.rank.sampling_state import SamplingState

Array = np.ndarray

_WITHOUT_STARTS = 3
"""Arrays of a part of a batch in which nothing decodes behind an encoder's input."""


@dataclass(eq=False)
class Running:
    """What the runner keeps of a request beside the ledger's bookkeeping."""

    request: Request
    sequence: Sequence
    prompt: Array
    """int64 [input tokens]"""
    output: list[int] = field(default_factory=list)
    table: Array | None = None
    """int32 [blocks], from its admission on"""
    start_s: float | None = None
    first_token_s: float | None = None
    ended: bool = False
    """Whether its last token is there, or it was cancelled: what else comes for it is ignored."""
    start: tuple[int, ...] = ()
    """What an encoder-decoder caches before its output; see `Model.start`."""
    slot: int | None = None
    """Its row of the sampling state, while it runs and where it has a repetition penalty."""
    entered: int = 0
    """Tokens of its prompt and output that are in that row."""

    @cached_property
    def sampling(self) -> tuple[float, int, float, float, int]:
        """Temperature, top-k, top-p, repetition penalty and seed."""
        request = self.request
        return request.temperature, request.top_k, request.top_p, request.repetition_penalty, request.own_seed

    def enter(self) -> list[int]:
        """The tokens of prompt and output that the sampling state lacks: from now on it has them."""
        begin, self.entered = self.entered, len(self.prompt) + len(self.output)
        if begin >= len(self.prompt):
            return self.output[begin - len(self.prompt) :]
        return [*self.request.prompt_ids[begin:], *self.output]

    @property
    def short_of(self) -> bool:
        """Whether the token that its next iteration takes isn't there yet."""
        place = self.sequence.cached - self.sequence.finished
        return place >= len(self.prompt) + len(self.start) + len(self.output)

    def token(self, position: int) -> int:
        """The token at a position of prompt, start and output."""
        beyond = position - len(self.prompt)
        if beyond < 0:
            return int(self.prompt[position])
        return self.start[beyond] if beyond < len(self.start) else self.output[beyond - len(self.start)]


@dataclass(frozen=True, eq=False)
class _Part:
    """The encoding or the decoding tokens of a piece, sequence after sequence."""

    tokens: Array
    """int64 [tokens]"""
    positions: Array
    """int64 [tokens]"""
    slots: Array
    """int64 [tokens]"""
    attention: tuple[Array, ...]
    """Tables, offsets and contexts, and in an encoder-decoder's decoding where their own tokens begin: see
    `AttentionBatch`."""
    rows: Array
    """int64: tokens that are followed by a new one, of prompts the last, but for an encoder-decoder's."""
    receivers: list[Running]
    """Whose the new ones are."""


@dataclass(frozen=True, eq=False)
class _Decoding:
    """What stays as it is while the same sequences are decoded."""

    sequences: tuple[Sequence, ...]
    running: list[Running]
    tables: Array
    """int32 [sequences, most blocks]"""
    offsets: Array
    """int32 [sequences + 1]"""
    rows: Array
    """int64 [sequences]"""
    starts: tuple[Array, ...]
    """int32 [sequences], in an encoder-decoder"""

    @staticmethod
    def of(sequences: tuple[Sequence, ...], running: list[Running]) -> "_Decoding":
        """That of these sequences, whose blocks are known."""
        starts = [np.array([len(one.prompt) for one in running], dtype=np.int32)] if running[0].start else []
        offsets = np.arange(len(running) + 1, dtype=np.int32)
        return _Decoding(sequences, running, _tables(running), offsets, np.arange(len(running)), tuple(starts))


@dataclass(frozen=True, eq=False)
class Work:
    """One piece of a step, ready to be computed: the arrays of a `Batch`, and what a span says of it."""

    phase: Phase
    micro_batch: int
    sequences: int
    computed: int
    """Tokens, without the rows that only fill up."""
    tokens: Array
    positions: Array
    slots: Array
    attention: tuple[tuple[Any, ...], ...]
    """(begin, end, tables, offsets, contexts, and starts where there are any)"""
    rows: Array | None
    gives: int
    """Tokens that it gives."""
    handed: Array | None = None
    """Blocks whose keys and values are sent to the decoding side afterwards, where that is another: int64 [n]"""
    sampling: tuple[Array, ...] | None = None
    """How its tokens are chosen: the arrays of a `Sampling` but the last, then the slots of the sampling state that
    begin anew, int64 [n], and the slots and tokens that are entered there, int64 [2, n]. None: all greedily."""
    work_lists: tuple[tuple[Array, ...], ...] = ()
    """For each part of the attention the arrays of a `WorkList`, none where it has none; see `dealt`."""

    @property
    def prompts(self) -> int:
        """How many of its first rows are prompts', in an encoder-decoder."""
        _, end, *arrays = self.attention[0]
        return end if len(arrays) == _WITHOUT_STARTS else 0

    @property
    def decoding_in(self) -> Array:
        """The first block of each decoding sequence, in an encoder-decoder: int32 [sequences]"""
        _, _, tables, *others = self.attention[-1]
        return tables[: 0 if 1 + len(others) == _WITHOUT_STARTS else None, 0]

    @property
    def arrays(self) -> list[Array]:
        """Everything that computing it takes, in order."""
        parts = [array for (_, _, *arrays), lists in self._parts for array in (*arrays, *lists)]
        rows = [] if self.rows is None else [self.rows]
        return [self.tokens, self.positions, self.slots, *parts, *rows, *(self.sampling or ())]

    @property
    def _parts(self) -> Iterator[tuple[Any, tuple[Array, ...]]]:
        """The attention's parts, each with its work list's arrays."""
        return itertools.zip_longest(self.attention, self.work_lists, fillvalue=())

    def dealt(self, dealing: Dealing | None) -> "Work":
        """The same with a work list for each part in which every sequence has one token; None: with none."""
        if dealing is None:
            return self
        parts = ((end - begin, contexts) for begin, end, _, _, contexts, *_ in self.attention)
        lists = tuple(dealing.deal(contexts) if tokens == len(contexts) else () for tokens, contexts in parts)
        return replace(self, work_lists=lists)

    def batch(self, gpu: Gpu | None = None, state: SamplingState | None = None) -> Batch:
        """Its tensors, on a GPU or on the processor; with the sampling state where its tokens are chosen."""
        return self.batch_of(send(self.arrays, gpu), state)

    def batch_of(self, tensors: Items[torch.Tensor], state: SamplingState | None = None) -> Batch:
        """The batch of tensors that are like `arrays`."""
        left = iter(tensors)
        return Batch(
            tokens=next(left),
            positions=next(left),
            slots=next(left),
            attention=tuple(
                AttentionBatch(
                    *(begin, end, *(next(left) for _ in arrays)),
                    work=WorkList(*(next(left) for _ in lists)) if lists else None,
                )
                for (begin, end, *arrays), lists in self._parts
            ),
            rows=None if self.rows is None else next(left),
            sampling=state.sampling(self.sampling, list(left)) if state and self.sampling else None,
        )

    def padded(self, sequences: int, width: int, scratch: int, block_size: int) -> "Work":
        """A piece that decodes one token of each sequence, with more sequences, which only fill up: theirs is the block
        `scratch` alone. Tables are `width` blocks wide. It gives the states of all rows, and chooses no tokens.
        """
        (_, _, tables, _, contexts, *starts) = self.attention[0]
        held, begun = (
            self.computed,
            min(1, len(starts)),
        )  # those behind an input have one token of it, and one of theirs
        wide = np.full((sequences, width), scratch, dtype=np.int32)
        wide[:held, : tables.shape[1]] = tables
        filling = ((self.tokens, 0), (self.positions, begun), (self.slots, scratch * block_size + begun % block_size))
        tokens, positions, slots = (_filled(array[:held], sequences, value) for array, value in filling)
        places = [_filled(contexts, sequences, 1 + begun), *(_filled(array, sequences, begun) for array in starts)]
        attention = (0, sequences, wide, np.arange(sequences + 1, dtype=np.int32), *places)
        return replace(
            self,
            tokens=tokens,
            positions=positions,
            slots=slots,
            attention=(attention,),
            rows=None,
            sampling=None,
        )


class Assembler:
    """Makes work of pieces. A decoding batch's tables are made when somebody joins or leaves it.

    `running` is by `Sequence.index`. A finished sequence of a static batch computes its last cached token again, in
    place: its row costs what it costs, and changes nothing.
    """

    def __init__(self, running: Mapping[int, Running], block_size: int):
        self._running, self._block_size = running, block_size
        self._batches: dict[int, _Decoding] = {}
        """What each micro-batch decoded last."""

    def __call__(self, piece: Piece) -> tuple[Work, list[Running]]:
        """The work of a piece, and the requests that it gives a token, in order."""
        parts = [self._encoding(piece)] if piece.encode else []
        if piece.decode:
            parts.append(self._decoding(piece))
        begins = [0, *itertools.accumulate(len(part.tokens) for part in parts)]
        computed = begins.pop()
        fill = np.zeros(computed_rows(computed) - computed, dtype=np.int64)
        receivers = [one for part in parts for one in part.receivers]
        rows = np.concatenate([part.rows + begin for part, begin in zip(parts, begins, strict=True)])
        work = Work(
            phase=piece.phase,
            micro_batch=piece.micro_batch,
            sequences=piece.sequences,
            computed=computed,
            tokens=np.concatenate([*(part.tokens for part in parts), fill]),
            positions=np.concatenate([*(part.positions for part in parts), fill]),
            slots=np.concatenate([part.slots for part in parts]),
            attention=tuple(
                (begin, begin + len(part.tokens), *part.attention) for part, begin in zip(parts, begins, strict=True)
            ),
            rows=None if len(rows) == computed + len(fill) else rows,
            gives=len(rows),
            sampling=_sampling(receivers),
        )
        return work, receivers

    def _encoding(self, piece: Piece) -> _Part:
        encoding = [self._running[sequence.index] for sequence, _ in piece.encode]
        counts = np.array([count for _, count in piece.encode])
        begins = [sequence.cached for sequence, _ in piece.encode]
        contexts = (counts + begins).tolist()
        for one in encoding:
            if one.table is None:
                one.table = np.asarray(one.sequence.blocks, dtype=np.int32)
        spans = list(zip(encoding, begins, contexts, strict=True))
        positions = np.concatenate([np.arange(begin, end) for _, begin, end in spans])
        tables, offsets = _tables(encoding), np.array([0, *counts.cumsum()], dtype=np.int32)
        whole = [end == len(one.prompt) and not one.start for one, _, end in spans]
        return _Part(
            tokens=np.concatenate([one.prompt[begin:end] for one, begin, end in spans]),
            positions=positions,
            slots=self._slots(np.repeat(np.arange(len(counts)), counts), positions, tables),
            attention=(tables, offsets, np.array(contexts, dtype=np.int32)),
            rows=(offsets[1:] - 1)[whole].astype(np.int64),
            receivers=[one for one, done in zip(encoding, whole, strict=True) if done],
        )

    def _decoding(self, piece: Piece) -> _Part:
        batch, sequences = self._batches.get(piece.micro_batch), tuple(piece.decode)
        if batch is None or batch.sequences != sequences:
            running = [self._running[sequence.index] for sequence in sequences]
            batch = self._batches[piece.micro_batch] = _Decoding.of(sequences, running)
        places = [sequence.cached - sequence.finished for sequence in sequences]
        positions = np.array(places)
        contexts = (positions + 1).astype(np.int32)
        return _Part(
            tokens=np.array([one.token(place) for one, place in zip(batch.running, places, strict=True)]),
            positions=positions,
            slots=self._slots(batch.rows, positions, batch.tables),
            attention=(batch.tables, batch.offsets, contexts, *batch.starts),
            rows=batch.rows,
            receivers=batch.running,
        )

    def _slots(self, sequences: Array, positions: Array, tables: Array) -> Array:
        """Every token's place in the cache: its sequence's block, then the offset in it. int64 [tokens]."""
        blocks, offsets = np.divmod(positions, self._block_size)
        return tables[sequences, blocks].astype(np.int64) * self._block_size + offsets


def _tables(running: list[Running]) -> Array:
    """The sequences' blocks, then zeros: int32 [sequences, most blocks]."""
    tables = [one.table for one in running if one.table is not None]
    wide = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    for row, table in zip(wide, tables, strict=True):
        row[: len(table)] = table
    return wide


def _sampling(receivers: list[Running]) -> tuple[Array, ...] | None:
    """How the receivers' tokens are chosen, as `Work.sampling`; None: all greedily."""
    if all(one.request.greedy for one in receivers):
        return None
    temperature, top_k, top_p, penalty, seed = zip(*(one.sampling for one in receivers), strict=True)
    cleared: list[int] = []
    slots: list[int] = []
    tokens: list[int] = []
    for one in receivers:
        if one.slot is not None:
            cleared += [] if one.entered else [one.slot]
            new = one.enter()
            slots += [one.slot] * len(new)
            tokens += new
        else:
            assert one.ended or one.request.repetition_penalty == 1, "a sequence with a penalty has a slot"
    return (
        np.array(temperature, dtype=np.float32),
        np.array(top_k, dtype=np.int32),
        np.array(top_p, dtype=np.float32),
        np.array(penalty, dtype=np.float32),
        np.array(seed, dtype=np.int64),
        np.array([len(one.prompt) + len(one.output) for one in receivers], dtype=np.int64),
        np.array([one.slot or 0 for one in receivers], dtype=np.int64),
        np.array(cleared, dtype=np.int64),
        np.array([slots, tokens], dtype=np.int64),
    )


def _filled(array: Array, count: int, value: int) -> Array:
    """The array, filled up with a value to so many elements."""
    return np.concatenate([array, np.full(count - len(array), value, dtype=array.dtype)])
