"""The ledger: which requests wait, which are resident, and the KV blocks they hold.

It is shared by the event simulator, which advances it by predicted time, and the runner, which advances it by real
work, so both take the same decisions.
"""

import heapq
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from exegpt.errors import InputError
from exegpt.policies.blocks import BlockPool

ENDLESS = sys.maxsize
"""As many iterations as there may be."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's bookkeeping.

        waiting ──admit──► resident (encoding ──► decoding) ──release──► done

    The encoding pass that completes a prompt gives the first output token. A decoding iteration caches the token made
    last and makes the next, so at most `input_tokens + max_output - 1` tokens are ever cached. In an encoder-decoder
    the first decoding iteration gives the first token, after a start token that is cached too.
    """

    index: int
    """The request's place in the run; unique."""
    input_tokens: int
    max_output: int
    arrival_s: float = 0.0
    # filled by the ledger
    cached: int = 0
    """Tokens whose keys and values are in the cache."""
    generated: int = 0
    """Output tokens made."""
    finished: bool = False
    blocks: list[int] = field(default_factory=list)
    ready_s: float = 0.0
    """When the decoding side has its keys and values, where it is another than the encoding side."""

    @property
    def tokens_needed(self) -> int:
        """The most tokens it will ever have in the cache (decoder-only)."""
        return self.input_tokens + self.max_output - 1

    @property
    def encoded(self) -> bool:
        """Whether its whole prompt is in the cache."""
        return self.cached >= self.input_tokens


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration: prompts (or chunks of them) to encode, and sequences to give one more token."""

    encode: tuple[tuple[Sequence, int], ...] = ()
    """(sequence, tokens of its prompt to compute now)."""
    decode: tuple[Sequence, ...] = ()
    repeats: int = 1
    """Iterations in a row for which the policy decides this, unless somebody finishes, is cancelled or arrives."""
    arrivals: bool = False
    """Whether somebody's arrival may end the row."""

    @property
    def phase(self) -> Any:
        """`encode`, `decode` or `mixed`."""
        if self.encode and self.decode:
            return "mixed"
        return "encode" if self.encode else "decode"

    @property
    def tokens(self) -> int:
        """Tokens computed."""
        return sum(count for _, count in self.encode) + len(self.decode)


class Ledger:
    """Waiting and resident sequences over one block pool.

    A sequence is admitted only when the blocks for all it may ever cache are free, and holds them until released: no
    running sequence can meet a full cache. With `early_termination` a finished sequence is released at once; without,
    when every resident one has finished (static batches). In an `encoder_decoder`, encoding gives no token.
    """

    def __init__(
        self,
        pool: BlockPool,
        order: Callable[[Sequence], Any],
        early_termination: bool = True,
        encoder_decoder: bool = False,
    ):
        self.pool = pool
        self.early_termination = early_termination
        self.encoder_decoder = encoder_decoder
        self.order = order
        self.encoding: list[Sequence] = []
        """Residents whose prompts aren't wholly in the cache, in order of admission."""
        self.decoding: list[Sequence] = []
        """The other residents, in the order in which their prompts ended."""
        self.iterations = 0
        """Decoding iterations booked so far."""
        self._coming: list[tuple[float, int, Sequence]] = []
        """Those that have not arrived: a heap by arrival."""
        self._queue: list[tuple[Any, int, Sequence]] = []
        """Those that have: a heap by order."""

    @property
    def waiting(self) -> list[Sequence]:
        """Those that are not resident, arrived or not, in no particular order."""
        return [entry[-1] for heap in (self._queue, self._coming) for entry in heap]

    @property
    def resident(self) -> list[Sequence]:
        """Those that hold blocks."""
        return self.encoding + self.decoding

    @property
    def residents(self) -> int:
        """How many hold blocks."""
        return len(self.encoding) + len(self.decoding)

    def blocks_needed(self, sequence: Sequence) -> int:
        """Blocks for all the tokens that a sequence may ever cache."""
        return self.pool.blocks_for(sequence.tokens_needed + self.encoder_decoder)

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Let sequences wait; InputError for one that the whole pool could not hold."""
        for sequence in sequences:
            need = self.blocks_needed(sequence)
            if need > self.pool.total:
                raise InputError(
                    f"Request {sequence.index} needs {need} KV blocks for {sequence.input_tokens} +"
                    f" {sequence.max_output} tokens, and the cache has {self.pool.total}: shorten it or give the "
                    "cache more memory."
                )
            heapq.heappush(self._coming, (sequence.arrival_s, sequence.index, sequence))

    def admit(self, most: int, now: float, tokens: float = float("inf")) -> list[Sequence]:
        """Make up to `most` waiting sequences resident, in order, as long as their prompts' sum stays within `tokens`
        and their blocks are free: nobody overtakes one that doesn't fit yet. Those that arrive after `now` are passed
        over.
        """
        self._arrive(now)
        admitted: list[Sequence] = []
        while self._queue and len(admitted) < most:
            sequence = self._queue[0][-1]
            if self.blocks_needed(sequence) > self.pool.available or sequence.input_tokens > tokens:
                break
            heapq.heappop(self._queue)
            self._take_in(sequence)
            tokens -= sequence.input_tokens
            admitted.append(sequence)
        return admitted

    def peek(self, most: int, now: float) -> list[Sequence]:
        """Up to `most` of the waiting sequences that have arrived, in order."""
        self._arrive(now)
        return [entry[-1] for entry in heapq.nsmallest(most, self._queue)]

    def admit_these(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Make sequences that wait resident, in the order given, until one's blocks aren't free."""
        admitted: list[Sequence] = []
        for sequence in sequences:
            if self.blocks_needed(sequence) > self.pool.available:
                break
            self._take_in(sequence)
            admitted.append(sequence)
        gone = set(map(id, admitted))
        self._queue = [entry for entry in self._queue if id(entry[-1]) not in gone]
        heapq.heapify(self._queue)
        return admitted

    def _take_in(self, sequence: Sequence) -> None:
        sequence.blocks = self.pool.allocate(self.blocks_needed(sequence))
        self.encoding.append(sequence)

    def advance(self, step: Step, iterations: int = 1) -> list[Sequence]:
        """Book a step's work, a decoding step `iterations` times, but never beyond the end of one of its sequences.
        Returns the sequences that finished in this step by their length.
        """
        finished = self._encode(step) if step.encode else []
        if step.decode:
            self.iterations += iterations
        for sequence in step.decode:
            if sequence.finished:  # a static batch computes its finished rows again until the last one ends
                continue
            sequence.cached += iterations
            sequence.generated += iterations
            if sequence.generated >= sequence.max_output:
                finished.append(sequence)
        self._end(finished)
        return finished

    def stop(self, sequence: Sequence) -> None:
        """End a sequence that made a stop token. On a pipeline that is known when later iterations of it have been
        booked already, the one that ends it by its length perhaps among them.
        """
        if not sequence.finished:
            self._end([sequence])

    def _encode(self, step: Step) -> list[Sequence]:
        finished = []
        completed = False
        for sequence, count in step.encode:
            sequence.cached += count
            if sequence.encoded:
                completed = True
                self.decoding.append(sequence)
                sequence.generated = 0 if self.encoder_decoder else 1
                if sequence.generated >= sequence.max_output:
                    finished.append(sequence)
        if completed:
            self.encoding = [sequence for sequence in self.encoding if not sequence.encoded]
        return finished

    def _end(self, finished: list[Sequence]) -> None:
        for sequence in finished:
            sequence.finished = True
        if not self.early_termination:
            if all(sequence.finished for sequence in self.resident):
                self._release(self.decoding)
        elif finished:
            self._release(finished)

    def cancel(self, sequence: Sequence) -> None:
        """Forget a sequence, waiting or resident; its blocks are free at once."""
        if sequence.blocks:
            self._release([sequence])
        else:
            self._queue, self._coming = (
                [entry for entry in heap if entry[-1] is not sequence] for heap in (self._queue, self._coming)
            )
            heapq.heapify(self._queue)
            heapq.heapify(self._coming)

    def drain(self) -> list[Sequence]:
        """Forget all waiting sequences and return them in the order of their indices; residents stay."""
        waiting = sorted(self.waiting, key=lambda sequence: sequence.index)
        self._queue, self._coming = [], []
        return waiting

    @property
    def idle(self) -> bool:
        """Whether nobody waits and nobody is resident."""
        return not (self.decoding or self.encoding or self._queue or self._coming)

    def next_arrival(self, now: float) -> float | None:
        """When the next waiting sequence arrives after `now`; None where none does."""
        self._arrive(now)
        return self._coming[0][0] if self._coming else None

    def check(self) -> None:
        """Raise AssertionError unless every block is either free or held by exactly one resident sequence."""
        held = [block for sequence in self.resident for block in sequence.blocks]
        if len(set(held)) != len(held) or len(held) + self.pool.available != self.pool.total:
            raise AssertionError(f"{len(held)} held + {self.pool.available} free blocks are not {self.pool.total}")

    def _arrive(self, now: float) -> None:
        while self._coming and self._coming[0][0] <= now:
            sequence = heapq.heappop(self._coming)[-1]
            heapq.heappush(self._queue, (self.order(sequence), sequence.index, sequence))

    def _release(self, sequences: list[Sequence]) -> None:
        gone = set(map(id, sequences))
        self.encoding = [s for s in self.encoding if id(s) not in gone]
        self.decoding = [s for s in self.decoding if id(s) not in gone]
        for sequence in sequences:
            self.pool.free(sequence.blocks)
            sequence.blocks = []
