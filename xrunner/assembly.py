"""Assembly: from a piece of a policy's step to the tensors of one iteration, without padding."""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from exegpt.kernels.sampling import Sampling
from exegpt.models import AttentionBatch, Batch, computed_rows
from exegpt.policies import Piece, Sequence
from exegpt.request import Request
from exegpt.timeline import Phase
from xrunner.gpu import Gpu
from xrunner.packing import send

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


@dataclass(frozen=True)
class _Part:
    """The encoding or the decoding tokens of a piece, sequence after sequence."""

    tokens: Array
    """int64 [tokens]"""
    positions: Array
    """int64 [tokens]"""
    counts: list[int]
    """[sequences]: its tokens"""
    contexts: list[int]
    """[sequences]: tokens in the cache afterwards"""
    tables: list[Array]
    """[sequences]: its blocks"""
    rows: list[int]
    """Tokens that are followed by a new one: of prompts the last, but for an encoder-decoder's."""
    receivers: list[Running]
    """Whose the new ones are."""
    starts: list[int] | None = None
    """[sequences]: where their own tokens begin in the cache, in an encoder-decoder."""


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
    """The arrays of a `Sampling`; None: all tokens are chosen greedily."""

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
        parts = [array for _, _, *arrays in self.attention for array in arrays]
        rows = [] if self.rows is None else [self.rows]
        return [self.tokens, self.positions, self.slots, *parts, *rows, *(self.sampling or ())]

    def batch(self, gpu: Gpu | None = None) -> Batch:
        """Its tensors, on a GPU or on the processor."""
        return self.batch_of(send(self.arrays, gpu))

    def batch_of(self, tensors: Items[torch.Tensor]) -> Batch:
        """The batch of tensors that are like `arrays`."""
        left = iter(tensors)
        return Batch(
            tokens=next(left),
            positions=next(left),
            slots=next(left),
            attention=tuple(
                AttentionBatch(begin, end, *(next(left) for _ in arrays)) for begin, end, *arrays in self.attention
            ),
            rows=None if self.rows is None else next(left),
            sampling=None if self.sampling is None else Sampling(*left),
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


def assemble(piece: Piece, running: Mapping[int, Running], block_size: int) -> tuple[Work, list[Running]]:
    """The work of a piece, and the requests that it gives a token, in order.

    `running` is by `Sequence.index`. A finished sequence of a static batch computes its last cached token again, in
    place: its row costs what it costs, and changes nothing.
    """
    parts = [_encoding(piece, running)] if piece.encode else []
    if piece.decode:
        parts.append(_decoding(piece, running))
    begin = 0
    attention, rows, slots = [], [], []
    for part in parts:
        tables = _tables(part)
        attention.append(_attention(begin, part, tables))
        slots.append(_slots(part, tables, block_size))
        rows += [begin + row for row in part.rows]
        begin += len(part.tokens)
    fill = np.zeros(computed_rows(begin) - begin, dtype=np.int64)
    receivers = [one for part in parts for one in part.receivers]
    work = Work(
        phase=piece.phase,
        micro_batch=piece.micro_batch,
        sequences=piece.sequences,
        computed=begin,
        tokens=np.concatenate([*(part.tokens for part in parts), fill]),
        positions=np.concatenate([*(part.positions for part in parts), fill]),
        slots=np.concatenate(slots),
        attention=tuple(attention),
        rows=None if len(rows) == begin + len(fill) else np.array(rows, dtype=np.int64),
        gives=len(rows),
        sampling=_sampling(receivers),
    )
    return work, receivers


def _encoding(piece: Piece, running: Mapping[int, Running]) -> _Part:
    encoding = [running[sequence.index] for sequence, _ in piece.encode]
    counts = [count for _, count in piece.encode]
    begins = [sequence.cached for sequence, _ in piece.encode]
    contexts = [begin + count for begin, count in zip(begins, counts, strict=True)]
    for one in encoding:
        if one.table is None:
            one.table = np.asarray(one.sequence.blocks, dtype=np.int32)
    whole = [context == len(one.prompt) and not one.start for one, context in zip(encoding, contexts, strict=True)]
    last = (np.cumsum(counts) - 1).tolist()
    spans = list(zip(encoding, begins, contexts, strict=True))
    return _Part(
        tokens=np.concatenate([one.prompt[begin:end] for one, begin, end in spans]),
        positions=np.concatenate([np.arange(begin, end) for _, begin, end in spans]),
        counts=counts,
        contexts=contexts,
        tables=[one.table for one in encoding if one.table is not None],
        rows=[row for row, done in zip(last, whole, strict=True) if done],
        receivers=[one for one, done in zip(encoding, whole, strict=True) if done],
    )


def _decoding(piece: Piece, running: Mapping[int, Running]) -> _Part:
    decoding = [running[sequence.index] for sequence in piece.decode]
    places = [one.sequence.cached - one.sequence.finished for one in decoding]
    return _Part(
        tokens=np.array([one.token(place) for one, place in zip(decoding, places, strict=True)], dtype=np.int64),
        positions=np.array(places, dtype=np.int64),
        counts=[1] * len(decoding),
        contexts=[place + 1 for place in places],
        tables=[one.table for one in decoding if one.table is not None],
        rows=list(range(len(decoding))),
        receivers=decoding,
        starts=[len(one.prompt) for one in decoding] if decoding[0].start else None,
    )


def _sampling(receivers: list[Running]) -> tuple[Array, ...] | None:
    """How the receivers' tokens are chosen; None: all greedily."""
    requests = [one.request for one in receivers]
    if all(request.greedy for request in requests):
        return None
    told = [[*one.prompt, *one.output] if one.request.repetition_penalty != 1 else [] for one in receivers]
    history = np.full((len(told), max(1, *map(len, told))), -1, dtype=np.int64)
    for row, tokens in zip(history, told, strict=True):
        row[: len(tokens)] = tokens
    return (
        np.array([request.temperature for request in requests], dtype=np.float32),
        np.array([request.top_k for request in requests], dtype=np.int32),
        np.array([request.top_p for request in requests], dtype=np.float32),
        np.array([request.repetition_penalty for request in requests], dtype=np.float32),
        np.array([request.own_seed for request in requests], dtype=np.int64),
        np.array([len(one.prompt) + len(one.output) for one in receivers], dtype=np.int64),
        history,
    )


def _filled(array: Array, count: int, value: int) -> Array:
    """The array, filled up with a value to so many elements."""
    return np.concatenate([array, np.full(count - len(array), value, dtype=array.dtype)])


def _tables(part: _Part) -> Array:
    """The sequences' blocks, then zeros: int32 [sequences, most blocks]."""
    lengths = np.fromiter(map(len, part.tables), dtype=np.int64, count=len(part.tables))
    wide = np.zeros((len(lengths), lengths.max()), dtype=np.int32)
    wide[np.arange(wide.shape[1]) < lengths[:, None]] = np.concatenate(part.tables)
    return wide


def _attention(begin: int, part: _Part, tables: Array) -> tuple[Any, ...]:
    offsets = np.cumsum([0, *part.counts], dtype=np.int32)
    places = [np.array(of, dtype=np.int32) for of in (part.contexts, part.starts) if of is not None]
    return begin, begin + len(part.tokens), tables, offsets, *places


def _slots(part: _Part, tables: Array, block_size: int) -> Array:
    """Every token's place in the cache: its sequence's block, then the offset in it. int64 [tokens]."""
    sequences = np.repeat(np.arange(len(part.counts)), part.counts)
    blocks = tables[sequences, part.positions // block_size].astype(np.int64)
    return blocks * block_size + part.positions % block_size
