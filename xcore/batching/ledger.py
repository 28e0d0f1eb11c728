"""The ledger: which sequences wait, which are resident, and the KV blocks that they hold.

The event simulator advances it by predicted time, the runner by real steps. Both therefore take the same decisions.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from math import inf

from xcore.batching.admission import ADMISSIONS, Admission, iterations_until_shortage
from xcore.batching.giving_way import GivingWay, Preemption
from xcore.batching.kv_pool import KVPool
from xcore.batching.order import FollowingOrder, Order
from xcore.batching.pins import Pins
from xcore.batching.prefix_pool import PrefixPool
from xcore.batching.queue import Queue
from xcore.batching.sequence import DECODE, FINISHED, PREEMPTED, PREFILL, Sequence
from xcore.batching.step import ENDLESS, Step
from xcore.errors import InputError

Fits = Callable[[Sequence], bool]


class Ledger:
    """Waiting and resident sequences over one KV pool.

    With `early_termination` a finished sequence is released at once; without it, when every resident one has finished
    (static batches). In an `encoder_decoder`, encoding gives no token. If `disaggregated`, a prefilled sequence decodes
    once its keys and values have arrived. With `drafted` draft tokens, a sequence holds blocks for these too.

    Over a `PrefixPool`, sequences share the cached blocks of their prompts. With `shares_in_step`, they also share the
    blocks that another sequence computes in the same step; the step must then compute them as one.

    A waiting sequence may hold the cached blocks of its prompt (`pin`), so that it finds them when it is admitted.

    With a `preemption`, running sequences give way to waiting ones (`giving_way`).

    If the next step is decided before this one has ended, a finished sequence is `lingering`: it holds its slot and its
    blocks until the step after that is decided.
    """

    def __init__(
        self,
        pool: KVPool,
        order: Order,
        early_termination: bool = True,
        encoder_decoder: bool = False,
        admission: Admission = "reserve",
        disaggregated: bool = False,
        shares_in_step: bool = True,
        lingering: bool = False,
        drafted: int = 0,
        preemption: Preemption | None = None,
    ):
        self.pool = pool
        self._prefixes = pool if isinstance(pool, PrefixPool) else None
        self.shares_in_step, self.drafted = shares_in_step, drafted
        self.early_termination, self.encoder_decoder = early_termination, encoder_decoder
        self.disaggregated = disaggregated
        self.following = order.fresh() if isinstance(order, FollowingOrder) else None
        self.waiting = Queue(self.following or order)
        self.admission = ADMISSIONS[admission](pool, encoder_decoder, drafted)
        self.encoding: list[Sequence] = []
        """Residents whose prompts aren't wholly in the cache, in order of admission."""
        self.decoding: list[Sequence] = []
        """The other residents, in the order in which their prompts ended."""
        self._lingering = lingering
        self.leaving: list[Sequence] = []
        """Sequences that finished in the latest step and still hold their blocks."""
        self.iterations = 0
        """Decode iterations booked so far."""
        self.giving_way = GivingWay(self, preemption)
        self._arriving: list[Sequence] = []
        """Ended sequences whose KV transfer into their blocks still runs."""
        self.reused = 0
        """Tokens that admitted sequences found in the cache so far."""
        self.pins = Pins(pool)
        if self.following:
            self.following.attach(self)

    @property
    def preemptions(self) -> int:
        """Return the number of preemptions so far."""
        return self.giving_way.preemptions

    @property
    def resident(self) -> list[Sequence]:
        """Return the sequences that hold blocks."""
        return self.encoding + self.decoding + self.leaving

    @property
    def residents(self) -> int:
        """Return how many sequences hold blocks."""
        return len(self.encoding) + len(self.decoding) + len(self.leaving)

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Enqueue sequences; InputError for one that the whole pool cannot hold."""
        for sequence in sequences:
            need = self.most_blocks(sequence)
            if need > self.pool.total:
                raise InputError(
                    f"Request {sequence.index} needs {need} KV blocks for {sequence.input_tokens} + "
                    f"{sequence.max_output} tokens, but the cache has {self.pool.total}: shorten the request or "
                    "give the cache more memory."
                )
            self.waiting.push(sequence)

    def pin(self, sequence: Sequence) -> int:
        """Let a waiting sequence hold the cached blocks of its prompt until it is admitted; return their tokens.

        At most half of all blocks are pinned, and none if an unfinished sequence would then find too few blocks even
        alone. Under first come, first served, pinned blocks are therefore freed early only for a sequence that grows
        beyond all other blocks, or after a change to fewer blocks.
        """
        return self._pin(sequence, self.cached_blocks(sequence))

    def pin_prefixes(self, holder: Hashable, *prefixes: Iterable[Hashable]) -> int:
        """Hold the cached blocks of these keys, as `pin` does, until `pins.remove`; return their tokens."""
        self.pins.remove(holder)
        found = {block: None for keys in prefixes if self._prefixes for block in self._prefixes.find(keys)}
        return self._pin(holder, list(found))

    def _pin(self, holder: Hashable, blocks: list[int]) -> int:
        unfinished = (*self.waiting, *self.encoding, *self.decoding) if blocks else ()
        need = max(map(self.giving_way.need, unfinished), default=0)
        return self.pins.add(holder, blocks, min(self.pool.total - need, self.pool.total // 2)) * self.pool.block_size

    def leave(self) -> list[Sequence]:
        """Remove all waiting sequences, and return them in the order of their indices."""
        for sequence in (left := self.waiting.drain()):
            self.pins.remove(sequence)
            self.giving_way.end(sequence)
        return left

    def cached_blocks(self, sequence: Sequence) -> list[int]:
        """Return the blocks that hold the beginning of a waiting sequence's tokens.

        The last token is never among them: its computation gives the next token.
        """
        if self._prefixes is None:
            return []
        tokens = sequence.cached if sequence.swapped else sequence.to_prefill - 1
        return self._prefixes.find(sequence.keys[: tokens // self.pool.block_size])

    def most_blocks(self, sequence: Sequence) -> int:
        """Return the blocks for all tokens that a sequence may ever cache."""
        return ADMISSIONS["reserve"](self.pool, self.encoder_decoder, self.drafted).blocks(sequence)

    def observe(self, now: float) -> None:
        """Report arrivals to a stateful order before each decision.

        The order therefore sees the same in the event simulator and in the engine.
        """
        if self.following:
            self.waiting.peek(now)

    def seat(self, sequence: Sequence, generated: int) -> bool:
        """Make a sequence resident that generated `generated` tokens before this ledger began.

        Returns:
            Whether its blocks were free; if not, nothing changes but its token counts.
        """
        sequence.generated, sequence.cached = generated, sequence.input_tokens + generated - 1 + self.encoder_decoder
        need = self.pool.blocks_for(sequence.cached) if self.admission.grows else self.admission.blocks(sequence)
        shared = self._prefixes.find(sequence.keys) if self._prefixes else []
        if self.missing(need, shared) > self.pool.available:
            return False
        self.take_blocks(sequence, need, shared)
        sequence.to_prefill, sequence.status = 0, DECODE
        self.decoding.append(sequence)
        return True

    def take_blocks(self, sequence: Sequence, need: int, shared: list[int]) -> None:
        """Give a sequence with cached tokens `need` blocks, the first of which are `shared`."""
        if self._prefixes:
            self._prefixes.hold(shared)
        sequence.blocks, sequence.published = [*shared, *self.pool.allocate(need - len(shared))], len(shared)
        self._publish(sequence, sequence.cached)

    def keep(self, sequence: Sequence, tokens: int) -> None:
        """Restore a waiting sequence's first `tokens` prompt tokens to the cache, if blocks are free; pin their blocks.

        They were cached before this ledger began.
        """
        if self._prefixes and tokens:
            self._prefixes.restore(sequence.keys[: tokens // self.pool.block_size])
            self.pin(sequence)

    def admit(self, most: int, now: float, chunk: int | None = None, fits: Fits | None = None) -> list[Sequence]:
        """Admit up to `most` waiting sequences that arrived by `now`, in strict order.

        Admission stops at the first sequence whose blocks aren't free, that doesn't pass the policy's `fits`, or whose
        last token before a preemption is still being computed.

        Args:
            most: Largest number of sequences to admit.
            now: Seconds; later arrivals are ignored.
            chunk: Tokens of a prompt that the step can still take; None: all.
            fits: The policy's own test of a sequence.
        """
        admitted: list[Sequence] = []
        while len(admitted) < most:
            sequence = self.waiting.peek(now)
            if sequence is None or not self._admit(sequence, now, chunk, fits):
                break
            self.waiting.pop()
            admitted.append(sequence)
        return admitted

    def admit_these(self, sequences: Iterable[Sequence], now: float, fits: Fits | None = None) -> list[Sequence]:
        """Admit these waiting sequences, in the given order, up to the first that has no free blocks or doesn't fit."""
        admitted: list[Sequence] = []
        for sequence in sequences:
            if not self._admit(sequence, now, None, fits):
                break
            admitted.append(sequence)
        self.waiting.remove(admitted)
        return admitted

    def grow_decoding(self, now: float, most: int = ENDLESS) -> tuple[tuple[Sequence, ...], list[Sequence]]:
        """Allocate a block for the next token of up to `most` decodable sequences. A step begins with this call.

        A sequence is decodable once its keys and values have arrived. See `grow`.

        Returns:
            The sequences to decode, and the preempted ones.
        """
        decode = self.decoding if most >= len(self.decoding) else self.decoding[:most]
        if self.disaggregated:
            decode = [sequence for sequence in decode if sequence.kv_arrived_s <= now]
        if not self.admission.grows:
            return tuple(decode), []
        steps, preempted = self.grow([(s, 1 + s.behind + self.drafted) for s in decode], now)
        return tuple([s for s, _ in steps]), preempted

    def grow(self, steps: list[tuple[Sequence, int]], now: float) -> tuple[list[tuple[Sequence, int]], list[Sequence]]:
        """Allocate the blocks for the tokens that each resident computes next, in this order.

        Preempts other sequences, or this one, until the blocks suffice.

        Returns:
            The residents that run with their tokens, and the preempted sequences.
        """
        preempted: list[Sequence] = []
        if not self.admission.grows:
            return steps, preempted
        for sequence, tokens in steps:
            if sequence.status is PREEMPTED or self._has_room(sequence, tokens):
                continue
            while sequence.status is not PREEMPTED and not self._extend(sequence, tokens):
                if self.residents == 1 and self.pins.remove_newest(sequence):
                    continue  # it would be preempted only to return at once
                preempted.append(self.giving_way.victim(now))
                self.giving_way.preempt(preempted[-1], now)
        return [step for step in steps if step[0].status is not PREEMPTED] if preempted else steps, preempted

    def extend(self, step: Step, iterations: int) -> None:
        """Allocate the blocks of a step's decoding sequences for `iterations` in a row, which `repeats` allowed."""
        if self.admission.grows:
            for sequence in step.decode:
                tokens = sequence.needed(iterations) + self.drafted
                if not self._has_room(sequence, tokens) and not self._extend(sequence, tokens):
                    raise MemoryError(f"no blocks for {iterations} iterations of request {sequence.index}")

    def repeats(self, step: Step, preempted: list[Sequence]) -> int:
        """Return how many times in a row a step may run, by its policy and by the free blocks.

        `preempted`: the sequences that the decision for this step has preempted.
        """
        if step.repeats == 1 or self.leaving or (step.arrivals and self.waiting.unsteady):
            return 1
        if self.giving_way.ranks_running and self.waiting.any_arrived:  # it may find less room from step to step
            return 1
        if not self.admission.grows:
            return step.repeats
        # A preempted sequence whose blocks are still cached may return at once.
        if (preempted and self._prefixes) or any(sequence.behind for sequence in step.decode):
            return 1
        return iterations_until_shortage(self.pool, step.decode, step.repeats, self.drafted)

    def _has_room(self, sequence: Sequence, tokens: int) -> bool:
        """Return whether a sequence needs no block for `tokens` more tokens; False if prefixes are cached."""
        return self._prefixes is None and sequence.cached + tokens <= len(sequence.blocks) * self.pool.block_size

    def _extend(self, sequence: Sequence, tokens: int) -> bool:
        """Allocate a sequence's blocks for `tokens` more cached tokens if they are free; a finished row needs none."""
        if sequence.status is FINISHED:
            return True
        missing = self.pool.blocks_for(sequence.cached + tokens) - len(sequence.blocks)
        if missing > 0:
            if missing > self.pool.available:
                return False
            sequence.blocks = [*sequence.blocks, *self.pool.allocate(missing)]
        if self._prefixes is not None and self.shares_in_step:
            self._publish(sequence, sequence.cached + tokens)
        return True

    def put_back(self, sequence: Sequence, now: float) -> None:
        """Free the blocks of a resident that was preempted: it waits again.

        If only finished rows of a static batch remain, the batch ends.
        """
        self._release([sequence])
        self._finish([])
        if self.following:
            self.following.stop(sequence, now)
        self.waiting.push(sequence, now)

    def _admit(self, sequence: Sequence, now: float, chunk: int | None, fits: Fits | None) -> bool:
        """Make a sequence resident if its blocks are free and no other rule prevents it."""
        if sequence.last_token_s > now or sequence.swapped or (fits is not None and not fits(sequence)):
            return False
        reused, need = self.cached_blocks(sequence), self.admission.blocks(sequence)
        while self.missing(need, reused) > self.pool.available:
            if self.residents or not self.pins.remove_newest(sequence):
                return False
        if reused:
            self._reuse(sequence, reused)
        sequence.receive()
        self.pins.remove(sequence)
        prefilled = sequence.to_prefill if chunk is None else min(chunk, sequence.to_prefill)
        allocated = self.pool.allocate(self.admission.first_blocks(sequence, prefilled) - len(reused))
        sequence.blocks = [*reused, *allocated] if reused else allocated
        sequence.status = PREFILL
        self.encoding.append(sequence)
        if self.following:
            self.following.start(sequence, now)
        if self._prefixes is not None and self.shares_in_step:
            self._publish(sequence, sequence.cached + prefilled)
        return True

    def missing(self, need: int, cached: list[int]) -> int:
        """Return how many free blocks a sequence takes that needs `need` blocks, of which `cached` are cached."""
        return need - len(cached) + (self._prefixes.free_among(cached) if self._prefixes else 0)

    def _reuse(self, sequence: Sequence, blocks: list[int]) -> None:
        """Share the blocks that hold the beginning of a sequence's prompt."""
        assert self._prefixes
        self._prefixes.hold(blocks)
        sequence.published, sequence.cached = len(blocks), len(blocks) * self.pool.block_size
        sequence.to_prefill -= sequence.cached
        self.reused, sequence.reused = self.reused + sequence.cached, sequence.reused + sequence.cached
        if sequence.status is not PREEMPTED:
            sequence.hit = sequence.cached

    def _publish(self, sequence: Sequence, tokens: int) -> None:
        """Publish the full blocks of a resident's first `tokens` tokens if it has their keys."""
        if self._prefixes is None:
            return
        full = min(tokens // self.pool.block_size, len(sequence.keys))
        for number in range(sequence.published, full):
            self._prefixes.publish(sequence.blocks[number], sequence.keys[number])
        sequence.published = max(sequence.published, full)

    def advance(self, step: Step, iterations: int = 1) -> list[Sequence]:
        """Book a step's work; its decoding counts `iterations` times, but never beyond the end of one of its sequences.

        Returns:
            The sequences that finished in this step by their length.
        """
        finished: list[Sequence] = []
        self.settle()
        if self.following:
            self.following.book(step, iterations)
        if step.decode:
            self.iterations += iterations
            if self.encoder_decoder:
                self._catch_up(step)
        for sequence in step.decode:
            if sequence.status is FINISHED:  # a row of a static batch, computed again until the last one ends
                continue
            sequence.decode(iterations)
            if sequence.generated >= sequence.ends:
                finished.append(sequence)
        if step.encode:
            finished += self._encode(step)
        if self._prefixes:
            for sequence in (*step.decode, *(sequence for sequence, _ in step.encode)):
                self._publish(sequence, sequence.cached)
        self._finish(finished)
        return finished

    def _catch_up(self, step: Step) -> None:
        """Book the outputs of preempted sequences that an encoder-decoder has computed again."""
        for sequence in step.decode:
            sequence.cached += sequence.behind
            sequence.behind = 0

    def stop(self, sequence: Sequence) -> None:
        """End a sequence that generated a stop token.

        On a pipeline, the stop is known only after later iterations of the sequence are booked, perhaps even its last
        one.
        """
        if sequence.status is PREEMPTED:
            self.waiting.remove([sequence])
            sequence.status = FINISHED
            self._end([sequence])
        elif not sequence.finished:
            self._finish([sequence])

    def fail(self, sequence: Sequence) -> None:
        """End a sequence after an error, as after a stop token. Its cached blocks can't be found again."""
        if self._prefixes:
            self._prefixes.withdraw(sequence.keys)
            sequence.keys = ()
        self.stop(sequence)

    def _encode(self, step: Step) -> list[Sequence]:
        finished = []
        completed = False
        for sequence, count in step.encode:
            sequence.cached += count
            sequence.to_prefill -= count
            if not sequence.to_prefill:
                completed = True
                sequence.status = DECODE
                self.decoding.append(sequence)
                sequence.generated = sequence.recomputed + (not self.encoder_decoder)
                if sequence.generated >= sequence.ends:
                    finished.append(sequence)
        if completed:
            self.encoding = [sequence for sequence in self.encoding if sequence.status is PREFILL]
        return finished

    def _finish(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            sequence.status = FINISHED
        self._end(sequences)
        if not self.early_termination:
            if all(sequence.finished for sequence in self.resident):
                self._release(self.decoding)
        elif sequences and self._lingering:
            self.decoding = [sequence for sequence in self.decoding if sequence.status is not FINISHED]
            self.leaving = sequences
        elif sequences:
            self._release(sequences)

    def settle(self) -> None:
        """Free the blocks of leaving sequences, whose step has ended."""
        if self.leaving:
            self._release(self.leaving)
            self.leaving = []

    def cancel(self, sequence: Sequence) -> None:
        """Remove a sequence, waiting or resident."""
        if sequence.blocks:
            self._release([sequence])
        else:
            self.waiting.remove([sequence])
            self.pins.remove(sequence)
        sequence.status = FINISHED
        self._end([sequence])

    def _end(self, sequences: list[Sequence]) -> None:
        """Report the end of sequences."""
        for sequence in sequences:
            self.giving_way.end(sequence)
            if self.following:
                self.following.end(sequence)

    def arrived(self, sequences: Iterable[Sequence], now: float) -> None:
        """Mark sequences whose keys and values have arrived in their blocks: they may decode from now on.

        Blocks of sequences that have ended meanwhile are freed.
        """
        for sequence in sequences:
            sequence.kv_arrived_s = now
            if sequence in self._arriving:
                self._arriving.remove(sequence)
                self._free(sequence)

    @property
    def idle(self) -> bool:
        """Return whether no sequence waits and none is resident."""
        return not (self.decoding or self.encoding or self.waiting)

    def check(self) -> None:
        """Raise AssertionError unless every block is free, or held by one sequence or by those that share it."""
        holders = (*self.resident, *self._arriving)
        held = Counter([block for sequence in holders for block in sequence.blocks])
        self.pool.check(held + self.pins.held)
        self.giving_way.check()

    def _release(self, sequences: list[Sequence]) -> None:
        gone = set(sequences)
        self.encoding = [s for s in self.encoding if s not in gone]
        self.decoding = [s for s in self.decoding if s not in gone]
        for sequence in sequences:
            if sequence.kv_arrived_s == inf:  # later writes to its blocks must not reach the next holder
                self._arriving.append(sequence)
            else:
                self._free(sequence)

    def _free(self, sequence: Sequence) -> None:
        self.pool.free(sequence.blocks)
        sequence.blocks = []
