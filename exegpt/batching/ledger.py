"""The ledger: which sequences wait, which are resident, and the KV blocks they hold.

It is shared by the event simulator, which advances it by predicted time, and the runner, which advances it by real
work, so both take the same decisions.
"""

from collections.abc import Iterable

from exegpt.batching.admission import Reserve
from exegpt.batching.kv_pool import KVPool
from exegpt.batching.queue import Order, Queue
from exegpt.batching.sequence import DECODE, FINISHED, PREFILL, Sequence
from exegpt.batching.step import Step
from exegpt.errors import InputError


class Ledger:
    """Waiting and resident sequences over one KV pool.

    With `early_termination` a finished sequence is released at once; without, when every resident one has finished
    (static batches). In an `encoder_decoder`, encoding gives no token.
    """

    def __init__(
        self,
        pool: KVPool,
        order: Order,
        early_termination: bool = True,
        encoder_decoder: bool = False,
    ):
        self.pool = pool
        self.early_termination = early_termination
        self.encoder_decoder = encoder_decoder
        self.waiting = Queue(order)
        self.admission = Reserve(pool, encoder_decoder)
        self.encoding: list[Sequence] = []
        """Residents whose prompts aren't wholly in the cache, in order of admission."""
        self.decoding: list[Sequence] = []
        """The other residents, in the order in which their prompts ended."""
        self.iterations = 0
        """Decoding iterations booked so far."""

    @property
    def resident(self) -> list[Sequence]:
        """Sequences that hold blocks."""
        return self.encoding + self.decoding

    @property
    def residents(self) -> int:
        """How many sequences hold blocks."""
        return len(self.encoding) + len(self.decoding)

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Let sequences wait; InputError for one that the whole pool could not hold."""
        for sequence in sequences:
            need = self.admission.blocks(sequence)
            if need > self.pool.total:
                raise InputError(
                    f"Request {sequence.index} needs {need} KV blocks for {sequence.input_tokens} +"
                    f" {sequence.max_output} tokens, and the cache has {self.pool.total}: shorten it or give the "
                    "cache more memory."
                )
            self.waiting.push(sequence)

    def admit(self, most: int, now: float, tokens: float = float("inf")) -> list[Sequence]:
        """Make up to `most` waiting sequences resident, in order, as long as their prompts' sum stays within `tokens`
        and their blocks are free: none overtakes one that doesn't fit yet. Those that arrive after `now` are passed
        over.
        """
        admitted: list[Sequence] = []
        while len(admitted) < most:
            sequence = self.waiting.peek(now)
            if sequence is None or sequence.input_tokens > tokens or not self._allocate(sequence):
                break
            self.waiting.pop()
            tokens -= sequence.input_tokens
            admitted.append(sequence)
        return admitted

    def admit_these(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Make waiting sequences resident, in the order given, until one's blocks aren't free."""
        admitted: list[Sequence] = []
        for sequence in sequences:
            if not self._allocate(sequence):
                break
            admitted.append(sequence)
        self.waiting.remove(admitted)
        return admitted

    def _allocate(self, sequence: Sequence) -> bool:
        """Make a sequence resident, if its blocks are free."""
        count = self.admission.blocks(sequence)
        if count > self.pool.available:
            return False
        sequence.blocks = self.pool.allocate(count)
        sequence.status = PREFILL
        self.encoding.append(sequence)
        return True

    def advance(self, step: Step, iterations: int = 1) -> list[Sequence]:
        """Book a step's work, a decoding step `iterations` times, but never beyond the end of one of its sequences.
        Returns the sequences that finished in this step by their length.
        """
        finished = self._encode(step) if step.encode else []
        if step.decode:
            self.iterations += iterations
        for sequence in step.decode:
            if sequence.status is FINISHED:  # a row of a static batch, computed again until the last one ends
                continue
            sequence.cached += iterations
            sequence.generated += iterations
            if sequence.generated >= sequence.max_output:
                finished.append(sequence)
        self._finish(finished)
        return finished

    def stop(self, sequence: Sequence) -> None:
        """End a sequence that made a stop token. On a pipeline that is known when later iterations of it have been
        booked already, the one that ends it by its length perhaps among them.
        """
        if not sequence.finished:
            self._finish([sequence])

    def _encode(self, step: Step) -> list[Sequence]:
        finished = []
        completed = False
        for sequence, count in step.encode:
            sequence.cached += count
            if sequence.encoded:
                completed = True
                sequence.status = DECODE
                self.decoding.append(sequence)
                sequence.generated = 0 if self.encoder_decoder else 1
                if sequence.generated >= sequence.max_output:
                    finished.append(sequence)
        if completed:
            self.encoding = [sequence for sequence in self.encoding if sequence.status is PREFILL]
        return finished

    def _finish(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            sequence.status = FINISHED
        if not self.early_termination:
            if all(sequence.finished for sequence in self.resident):
                self._release(self.decoding)
        elif sequences:
            self._release(sequences)

    def cancel(self, sequence: Sequence) -> None:
        """Forget a sequence, waiting or resident; its blocks are free at once."""
        if sequence.blocks:
            self._release([sequence])
        else:
            self.waiting.remove([sequence])

    @property
    def idle(self) -> bool:
        """Whether no sequence waits and none is resident."""
        return not (self.decoding or self.encoding or self.waiting)

    def check(self) -> None:
        """Raise AssertionError unless every block is either free or held by exactly one resident sequence."""
        held = [block for sequence in self.resident for block in sequence.blocks]
        if len(set(held)) != len(held) or len(held) + self.pool.available != self.pool.total:
            raise AssertionError(f"{len(held)} held + {self.pool.available} free blocks are not {self.pool.total}")

    def _release(self, sequences: list[Sequence]) -> None:
        gone = set(map(id, sequences))
        self.encoding = [s for s in self.encoding if id(s) not in gone]
        self.decoding = [s for s in self.decoding if id(s) not in gone]
        for sequence in sequences:
            self.pool.free(sequence.blocks)
            sequence.blocks = []
