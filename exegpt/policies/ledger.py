"""The ledger: which requests wait, which are resident, and the KV blocks they hold.

It is shared by the event simulator, which advances it by predicted time, and the runner, which advances it by real
work, so both take the same decisions.
"""

import bisect
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from exegpt.errors import InputError
from exegpt.policies.blocks import BlockPool


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's bookkeeping.

        waiting ──admit──► resident (encoding ──► decoding) ──release──► done

    The encoding pass that completes a prompt gives the first output token. A decoding iteration caches the token made
    last and makes the next, so at most `input_tokens + max_output - 1` tokens are ever cached.
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

    @property
    def tokens_needed(self) -> int:
        """The most tokens it will ever have in the cache."""
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
    when every resident one has finished (static batches).
    """

    def __init__(
        self,
        pool: BlockPool,
        order: Callable[[Sequence], Any],
        early_termination: bool = True,
    ):
        self.pool = pool
        self.early_termination = early_termination
        self.order = order
        self.waiting: list[Sequence] = []
        self.resident: list[Sequence] = []

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Let sequences wait; InputError for one that the whole pool could not hold."""
        for sequence in sequences:
            need = self.pool.blocks_for(sequence.tokens_needed)
            if need > self.pool.total:
                raise InputError(
                    f"Request {sequence.index} needs {need} KV blocks for {sequence.input_tokens} +"
                    f" {sequence.max_output} tokens, and the cache has {self.pool.total}: shorten it or give the "
                    "cache more memory."
                )
            bisect.insort(self.waiting, sequence, key=self.order)

    def admit(self, most: int, now: float, tokens: float = float("inf")) -> list[Sequence]:
        """Make up to `most` waiting sequences resident, in order, as long as their prompts' sum stays within `tokens`
        and their blocks are free. Those that arrive after `now` are passed over.
        """
        admitted: list[Sequence] = []
        kept: list[Sequence] = []
        for place, sequence in enumerate(self.waiting):
            need = self.pool.blocks_for(sequence.tokens_needed)
            full = len(admitted) >= most or need > self.pool.free or sequence.input_tokens > tokens
            if full and sequence.arrival_s <= now:  # nobody overtakes a request that merely doesn't fit yet
                kept.extend(self.waiting[place:])
                break
            if sequence.arrival_s > now:
                kept.append(sequence)
                continue
            sequence.blocks = self.pool.take(need)
            tokens -= sequence.input_tokens
            admitted.append(sequence)
        self.waiting = kept
        self.resident.extend(admitted)
        return admitted

    def advance(self, step: Step, stopped: Collection[Sequence] = ()) -> list[Sequence]:
        """Book a step's work. `stopped` made a stop token; returns the sequences that finished in this step."""
        finished = []
        for sequence, count in step.encode:
            sequence.cached += count
            if sequence.encoded:
                sequence.generated = 1
                if sequence.max_output <= 1 or sequence in stopped:
                    finished.append(sequence)
        for sequence in step.decode:
            if sequence.finished:  # a static batch computes its finished rows again until the last one ends
                continue
            sequence.cached += 1
            sequence.generated += 1
            if sequence.generated >= sequence.max_output or sequence in stopped:
                finished.append(sequence)
        for sequence in finished:
            sequence.finished = True
        if self.early_termination:
            self._release(finished)
        elif all(sequence.finished for sequence in self.resident):
            self._release(list(self.resident))
        return finished

    def cancel(self, sequence: Sequence) -> None:
        """Forget a sequence, waiting or resident; its blocks are free at once."""
        if sequence in self.resident:
            self._release([sequence])
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    @property
    def idle(self) -> bool:
        """Whether nobody waits and nobody is resident."""
        return not self.waiting and not self.resident

    def next_arrival(self, now: float) -> float | None:
        """When the next waiting sequence arrives after `now`; None where none does."""
        return min((s.arrival_s for s in self.waiting if s.arrival_s > now), default=None)

    def check(self) -> None:
        """Raise AssertionError unless every block is either free or held by exactly one resident sequence."""
        held = [block for sequence in self.resident for block in sequence.blocks]
        if len(set(held)) != len(held) or len(held) + self.pool.free != self.pool.total:
            raise AssertionError(f"{len(held)} held + {self.pool.free} free blocks are not {self.pool.total}")

    def _release(self, sequences: list[Sequence]) -> None:
        gone = set(map(id, sequences))
        self.resident = [s for s in self.resident if id(s) not in gone]
        for sequence in sequences:
            self.pool.give_back(sequence.blocks)
            sequence.blocks = []
