"""Assembly: from a micro-batch to the arrays of one forward pass, without padding."""

import itertools
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from exegpt.kernels.log_probs import LogProbs, PromptLogProbs
from exegpt.kernels.sampling import Sampling
from exegpt.kernels.work_list import WorkList
from xcore.arrays import Integers, Integers32, Numbers
from xcore.batching import MicroBatch, Sequence, Swap
from xcore.specs.timeline import Phase
from xrunner.comm.gpu import Gpu
from xrunner.comm.packing import send
from xrunner.models import AttentionArrays, AttentionBatch, Batch, Dealing, computed_rows
from xrunner.rank.running import RunningRequest
from xrunner.rank.sampling_arrays import PromptRows, logprob_rows, prompt_logprob_rows, sampling_arrays
from xrunner.rank.sampling_state import SamplingState

Element = TypeVar("Element", np.int32, np.int64)


@dataclass(frozen=True, eq=False)
class _Part:
    """The prefill or the decode tokens of a micro-batch, sequence after sequence."""

    tokens: Integers
    """[tokens]"""
    positions: Integers
    """[tokens]"""
    slots: Integers
    """[tokens]"""
    attention: AttentionArrays
    """From its first token."""
    rows: Integers
    """Rows after which a token is sampled.

    That is a prompt's last row; an encoder-decoder's prompts have none.
    """
    receivers: list[RunningRequest]
    """Requests that get the sampled tokens."""


@dataclass(frozen=True, eq=False)
class _Decoding:
    """Arrays that don't change while the same sequences are decoded."""

    sequences: tuple[Sequence, ...]
    blocks: list[list[int]]
    running: list[RunningRequest]
    tables: Integers32
    """[sequences, most blocks]"""
    offsets: Integers32
    """[sequences + 1]"""
    rows: Integers
    """[sequences]"""
    starts: Integers32 | None
    """[sequences], in an encoder-decoder"""

    @staticmethod
    def of(sequences: tuple[Sequence, ...], running: list[RunningRequest], blocks: list[list[int]]) -> "_Decoding":
        """Return the arrays of these sequences, which have their blocks."""
        starts = np.array([len(request.prompt) for request in running], dtype=np.int32) if running[0].start else None
        offsets, rows = np.arange(len(running) + 1, dtype=np.int32), np.arange(len(running), dtype=np.int64)
        return _Decoding(sequences, blocks, running, _tables(running), offsets, rows, starts)


@dataclass(frozen=True, eq=False)
class DeviceBatch:
    """The input of a device for the forward pass of one micro-batch: a `Batch`'s arrays, and the facts of its span."""

    phase: Phase
    micro_batch: int
    sequences: int
    computed: int
    """Tokens, without padding rows."""
    tokens: Integers
    positions: Integers
    slots: Integers
    attention: tuple[AttentionArrays, ...]
    rows: Integers | None
    new_tokens: int
    """Tokens sampled after it: one for each decoding sequence and for each prompt that ends here."""
    transferred: Integers | None = None
    """Blocks that are sent to the decoding side afterwards, where disaggregated: [n]"""
    sampling: tuple[Numbers, ...] | None = None
    """See `sampling_arrays`; None: all greedy."""
    edits: tuple[Numbers, ...] | None = None
    """See `edit_arrays`; None: no row's logits are edited."""
    logprobs: tuple[Integers, int] | None = None
    """See `logprob_rows`; None: no request asks for log-probabilities."""
    prompt_logprobs: PromptRows | None = None
    """See `prompt_logprob_rows`."""
    fed: tuple[Integers, Integers] | None = None
    """Rows whose tokens aren't known on the host, and their places among the tokens sampled last: [n] each."""
    work_lists: tuple[tuple[Integers32, ...], ...] = ()
    """For each attention part the arrays of its `WorkList`, or none; see `with_work_lists`."""
    swaps: tuple[Swap, ...] = ()
    """Copies between the cache and the host before it."""

    @property
    def prompts(self) -> int:
        """Number of leading rows that belong to prompts, in an encoder-decoder."""
        first = self.attention[0]
        return first.end if first.starts is None else 0

    @property
    def decoding_blocks(self) -> Integers32:
        """The blocks of the decoding sequences, in an encoder-decoder: [sequences, most blocks]."""
        last = self.attention[-1]
        return last.tables[: 0 if last.starts is None else None]

    @property
    def arrays(self) -> list[Numbers]:
        """All arrays that the forward pass and sampling need, in order."""
        return [*self.forward_arrays, *self.sampling_arrays]

    @property
    def forward_arrays(self) -> list[Numbers]:
        """The part of `arrays` that the layers need."""
        parts = [array for part, lists in self._parts for array in (*part.arrays, *lists)]
        return [self.tokens, self.positions, self.slots, *parts]

    @property
    def tables(self) -> list[Integers32]:
        """The block tables of the attention's parts."""
        return [part.tables for part in self.attention]

    @property
    def table_places(self) -> list[int]:
        """The places of the block tables in `forward_arrays`."""
        sizes = [len(part.arrays) + len(lists) for part, lists in self._parts]
        return [3 + sum(sizes[:part]) for part in range(len(sizes))]

    @property
    def sampling_arrays(self) -> list[Numbers]:
        """The part of `arrays` that only the sampling rank needs."""
        rows = [] if self.rows is None else [self.rows]
        logprobs = [] if self.logprobs is None else [self.logprobs[0]]
        prompts = [] if self.prompt_logprobs is None else self.prompt_logprobs[:2]
        return [*rows, *(self.sampling or ()), *(self.edits or ()), *logprobs, *prompts]

    @property
    def result_size(self) -> int:
        """Number of elements that `Worker.run` returns on the sampling rank."""
        rows, most = self.logprobs or ((), 0)
        prompt_rows, *_, prompt_most = self.prompt_logprobs or ((), 0)
        return 1 + self.new_tokens + len(rows) * (1 + 2 * most) + len(prompt_rows) * (1 + 2 * prompt_most)

    @property
    def _parts(self) -> Iterator[tuple[AttentionArrays, tuple[Integers32, ...]]]:
        """The attention's parts, each with its work list's arrays."""
        return zip(self.attention, self.work_lists or [()] * len(self.attention), strict=True)

    def with_work_lists(self, dealing: Dealing | None) -> "DeviceBatch":
        """Return a copy with a work list for each part in which every sequence has one token.

        Without a `dealing`, return the batch itself.
        """
        if dealing is None:
            return self
        lists = (dealing.deal(p.contexts) if p.end - p.begin == len(p.contexts) else () for p in self.attention)
        return replace(self, work_lists=tuple(lists))

    def to_device(self, gpu: Gpu | None = None, state: SamplingState | None = None) -> Batch:
        """Return the batch's tensors on a GPU, or on the CPU without one.

        The sampling rank passes its sampling state.
        """
        return self.of_tensors(send(self.arrays, gpu), state)

    def of_tensors(self, tensors: Items[torch.Tensor], state: SamplingState | None = None) -> Batch:
        """Return the `Batch` of tensors in the order of `arrays`."""
        remaining = iter(tensors)

        def part(own: AttentionArrays, lists: tuple[Integers32, ...]) -> AttentionBatch:
            tables, offsets, contexts, *starts = (next(remaining) for _ in own.arrays)
            work = WorkList(*(next(remaining) for _ in lists)) if lists else None
            return AttentionBatch(own.begin, own.end, tables, offsets, contexts, starts[0] if starts else None, work)

        batch = Batch(
            tokens=next(remaining),
            positions=next(remaining),
            slots=next(remaining),
            attention=tuple(part(own, lists) for own, lists in self._parts),
            rows=None,
        )
        return self.sampled(batch, remaining, state)

    def sampled(self, batch: Batch, tensors: Iterator[torch.Tensor], state: SamplingState | None) -> Batch:
        """Return `batch` with what is sampled after it, given the tensors of `sampling_arrays`."""
        return replace(
            batch,
            rows=None if self.rows is None else next(tensors),
            sampling=self._sampling_of(tensors, state) if state else None,
            logprobs=self._logprobs_of(tensors) if state else None,
            prompt_logprobs=self._prompt_logprobs_of(tensors) if state else None,
        )

    def _sampling_of(self, tensors: Iterator[torch.Tensor], state: SamplingState) -> Sampling | None:
        """Return the `Sampling` of the arrays' tensors, which are consumed; enter new tokens into the state."""
        if self.sampling is None:
            return None
        count = len(self.sampling) + len(self.edits or ())
        return state.sampling(self.sampling, self.edits, list(itertools.islice(tensors, count)))

    def _logprobs_of(self, tensors: Iterator[torch.Tensor]) -> LogProbs | None:
        """Return the `LogProbs` of the rows' tensor, which is consumed."""
        return None if self.logprobs is None else LogProbs(next(tensors), self.logprobs[1])

    def _prompt_logprobs_of(self, tensors: Iterator[torch.Tensor]) -> PromptLogProbs | None:
        """Return the `PromptLogProbs` of the rows' and the tokens' tensors, which are consumed."""
        asked = self.prompt_logprobs
        return None if asked is None else PromptLogProbs(next(tensors), next(tensors), asked[-1])

    def padded(self, sequences: int, scratch: int, block_size: int) -> "DeviceBatch":
        """Return a copy of a decoding batch, padded to `sequences` sequences; its tables stay as they are.

        The padding sequences write only to block `scratch`. States of all rows are computed.
        """
        first, count = self.attention[0], self.computed
        begun = 0 if first.starts is None else 1  # a sequence has an input token before its first output
        filling = ((self.tokens, 0), (self.positions, begun), (self.slots, scratch * block_size + begun % block_size))
        tokens, positions, slots = (_filled(array[:count], sequences, value) for array, value in filling)
        starts = None if first.starts is None else _filled(first.starts, sequences, begun)
        offsets, contexts = np.arange(sequences + 1, dtype=np.int32), _filled(first.contexts, sequences, 1 + begun)
        attention = AttentionArrays(0, sequences, first.tables, offsets, contexts, starts)
        return replace(self, tokens=tokens, positions=positions, slots=slots, attention=(attention,))

    def padded_mixed(self, size: "MixedSize", scratch: int, block_size: int, dealing: Dealing | None) -> "DeviceBatch":
        """Return a copy padded to `size`: a part for prompts and one for decoding sequences; either may be empty.

        Both parts are of all rows, and their offsets tell which are theirs: padding sequences have none. Padding rows
        write only to block `scratch`. A token is sampled after as many rows as there are sequences.
        """
        count = self.computed
        filling = ((self.tokens, 0), (self.positions, 0), (self.slots, scratch * block_size))
        tokens, positions, slots = (_filled(array[:count], size.rows, value) for array, value in filling)
        given = list(self.attention)
        prompts = given.pop(0) if self.phase != "decode" else _no_sequences(0)
        decoding = given.pop() if given else _no_sequences(count)
        parts = size.padded(prompts, size.prompts), size.padded(decoding, size.sequences)
        lists: tuple[tuple[Integers32, ...], ...] = () if dealing is None else ((), dealing.deal(parts[1].contexts))
        rows = _filled(
            np.arange(count, dtype=np.int64) if self.rows is None else self.rows, size.prompts + size.sequences, 0
        )
        return replace(
            self, tokens=tokens, positions=positions, slots=slots, attention=parts, rows=rows, work_lists=lists
        )


@dataclass(frozen=True)
class MixedSize:
    """The sizes to which batches with prompts are padded for a graph."""

    rows: int
    prompts: int
    """Sequences that are prefilled; fewer than rows, which tells them from as many decoding ones."""
    sequences: int
    """Sequences that are decoded; fewer than rows."""
    width: int
    """Blocks of a table."""

    def holds(self, batch: DeviceBatch) -> bool:
        """Return whether a batch with prompts can be padded to this size."""
        (prompts, *decoding), wide = batch.attention, max(part.tables.shape[1] for part in batch.attention)
        decoded = sum(len(part.tables) for part in decoding)
        fits = len(prompts.tables) <= self.prompts and decoded <= self.sequences and wide <= self.width
        return fits and len(batch.tokens) <= self.rows

    def padded(self, part: AttentionArrays, sequences: int) -> AttentionArrays:
        """Return an attention part of all rows with so many sequences, of which the last have no tokens or tables."""
        offsets = _filled(part.offsets + np.int32(part.begin), sequences + 1, part.begin + int(part.offsets[-1]))
        return AttentionArrays(0, self.rows, part.tables, offsets, _filled(part.contexts, sequences, 0))


def _no_sequences(begin: int) -> AttentionArrays:
    """Return an attention part without sequences whose rows would begin at `begin`."""
    none = np.zeros(0, dtype=np.int32)
    return AttentionArrays(begin, begin, np.zeros((0, 1), dtype=np.int32), np.zeros(1, dtype=np.int32), none)


class Assembler:
    """Makes device batches from micro-batches.

    A decoding batch's tables are rebuilt when a sequence joins or leaves it.
    `running` is by `Sequence.index`. A finished sequence of a static batch computes its last cached token again, in
    place, which changes nothing.
    """

    def __init__(self, running: Mapping[int, RunningRequest], block_size: int):
        self._running, self._block_size = running, block_size
        self._batches: dict[int, _Decoding] = {}
        """The last decoding batch of each micro-batch."""

    def __call__(
        self, micro_batch: MicroBatch, sampled: Mapping[int, int] | None = None
    ) -> tuple[DeviceBatch, list[RunningRequest]]:
        """Return the device batch of a micro-batch, and the requests that get its sampled tokens, in order.

        `sampled` has the place among the tokens sampled last, by sequence index, of each token that isn't known on the
        host yet.
        """
        parts = [self._encoding(micro_batch)] if micro_batch.encode else []
        if micro_batch.decode:
            parts.append(self._decoding(micro_batch))
        begins = [0, *itertools.accumulate(len(part.tokens) for part in parts)]
        computed = begins.pop()
        fill = np.zeros(computed_rows(computed) - computed, dtype=np.int64)
        receivers = [receiver for part in parts for receiver in part.receivers]
        rows = np.concatenate([part.rows + begin for part, begin in zip(parts, begins, strict=True)])
        sampling, edits = sampling_arrays(receivers, sampled or {})
        batch = DeviceBatch(
            phase=micro_batch.phase,
            micro_batch=micro_batch.index,
            sequences=micro_batch.sequences,
            computed=computed,
            tokens=np.concatenate([*(part.tokens for part in parts), fill]),
            positions=np.concatenate([*(part.positions for part in parts), fill]),
            slots=np.concatenate([part.slots for part in parts]),
            attention=tuple(
                replace(part.attention, begin=begin, end=begin + len(part.tokens))
                for part, begin in zip(parts, begins, strict=True)
            ),
            rows=None if len(rows) == computed + len(fill) else rows,
            new_tokens=len(rows),
            sampling=sampling,
            edits=edits,
            logprobs=logprob_rows(receivers),
            prompt_logprobs=prompt_logprob_rows([(self._running[s.index], n) for s, n in micro_batch.encode]),
            fed=_fed(micro_batch, begins[-1], sampled) if sampled else None,
        )
        return batch, receivers

    def _encoding(self, micro_batch: MicroBatch) -> _Part:
        encoding = [self._running[sequence.index] for sequence, _ in micro_batch.encode]
        part = self._ragged(encoding, micro_batch.encode)
        last = [count == s.to_prefill and not self._running[s.index].start for s, count in micro_batch.encode]
        receivers = [request for request, completes in zip(encoding, last, strict=True) if completes]
        return replace(part, rows=part.rows[last], receivers=receivers)

    def _catching_up(self, running: list[RunningRequest]) -> _Part:
        """Assemble decoding of an encoder-decoder's preempted sequences, which compute their outputs again."""
        counts = [(request.sequence, 1 + request.sequence.behind) for request in running]
        part = self._ragged(running, counts)
        starts = np.array([len(request.prompt) for request in running], dtype=np.int32)
        return replace(part, attention=replace(part.attention, starts=starts))

    def _ragged(self, running: list[RunningRequest], counts: Items[tuple[Sequence, int]]) -> _Part:
        """Assemble the next tokens of sequences, as many as each computes."""
        for request in running:
            request.update_table()
        begins = [sequence.cached - sequence.finished for sequence, _ in counts]
        spans = [(request, b, b + n) for request, b, (_, n) in zip(running, begins, counts, strict=True)]
        positions = np.concatenate([np.arange(begin, end, dtype=np.int64) for _, begin, end in spans])
        tables, offsets = _tables(running), np.array([0, *itertools.accumulate(n for _, n in counts)], dtype=np.int32)
        places = np.repeat(np.arange(len(running), dtype=np.int64), np.diff(offsets))
        return _Part(
            tokens=np.concatenate([request.tokens(begin, end) for request, begin, end in spans]),
            positions=positions,
            slots=self._slots(places, positions, tables),
            attention=AttentionArrays(
                0, len(positions), tables, offsets, np.array([end for *_, end in spans], np.int32)
            ),
            rows=offsets[1:].astype(np.int64) - 1,
            receivers=running,
        )

    def _decoding(self, micro_batch: MicroBatch) -> _Part:
        decoding, sequences = self._batches.get(micro_batch.index), tuple(micro_batch.decode)
        if any(sequence.behind for sequence in sequences):
            return self._catching_up([self._running[sequence.index] for sequence in sequences])
        blocks = [sequence.blocks for sequence in sequences]  # other lists once they have grown: see `Ledger.grow`
        if decoding is None or decoding.sequences != sequences or decoding.blocks != blocks:
            running = [self._running[sequence.index] for sequence in sequences]
            for request in running:
                request.update_table()
            decoding = self._batches[micro_batch.index] = _Decoding.of(sequences, running, blocks)
        places = [sequence.cached - sequence.finished for sequence in sequences]
        positions = np.array(places)
        contexts = (positions + 1).astype(np.int32)
        return _Part(
            tokens=np.array([request.token(place) for request, place in zip(decoding.running, places, strict=True)]),
            positions=positions,
            slots=self._slots(decoding.rows, positions, decoding.tables),
            attention=AttentionArrays(0, len(places), decoding.tables, decoding.offsets, contexts, decoding.starts),
            rows=decoding.rows,
            receivers=decoding.running,
        )

    def _slots(self, sequences: Integers, positions: Integers, tables: Integers32) -> Integers:
        """Return every token's slot in the cache, block · block_size + offset: [tokens]."""
        blocks, offsets = np.divmod(positions, self._block_size)
        slots: Integers = tables[sequences, blocks].astype(np.int64) * self._block_size + offsets
        return slots


def _tables(running: list[RunningRequest]) -> Integers32:
    """Return the sequences' block tables, padded with zeros: [sequences, most blocks]."""
    tables = [request.table for request in running if request.table is not None]
    padded = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded


def _fed(micro_batch: MicroBatch, begin: int, sampled: Mapping[int, int]) -> tuple[Integers, Integers] | None:
    """Return `DeviceBatch.fed` of a micro-batch whose decoding rows begin at `begin`."""
    rows = [(begin + i, sampled[s.index]) for i, s in enumerate(micro_batch.decode) if s.index in sampled]
    if not rows:
        return None
    places = np.array(rows, dtype=np.int64)
    return places[:, 0].copy(), places[:, 1].copy()


def _filled(array: NDArray[Element], count: int, value: int) -> NDArray[Element]:
    """Return the array, padded with `value` to `count` elements."""
    return np.concatenate([array, np.full(count - len(array), value, dtype=array.dtype)])
