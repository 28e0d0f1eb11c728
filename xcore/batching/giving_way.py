"""Giving way: which running sequences are preempted, and where their keys and values are meanwhile.

Without a `Preemption`, only a lack of KV blocks preempts (`Ledger.grow`), the newest resident first, and its tokens are
prefilled again. With one, the order ranks running sequences too, as in vLLM-LTR: those behind the first waiting
sequence give way to it, and a lack of blocks preempts the last in the order. Their keys and values may be swapped: they
are copied to the host, and back before the sequence goes on.

Nothing is preempted in vain: residents give way only if that makes room for the waiting sequence. With keys that don't
rise while a sequence runs, two sequences never take turns. A starvation guard's promotions last for a quantum of steps.
"""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from xcore.batching.prefix_pool import PrefixPool
from xcore.batching.sequence import DECODE, FINISHED, PREEMPTED, PREFILL, Sequence

if TYPE_CHECKING:
    from xcore.batching.ledger import Ledger


@dataclass(frozen=True)
class Preemption:
    """Running sequences give way to waiting ones that the order puts before them."""

    host_blocks: int = 0
    """KV blocks that may be on the host at once.

    A preempted sequence is recomputed if its blocks would exceed them; 0: each one is.
    """


@dataclass(frozen=True, slots=True)
class Swap:
    """A copy of a sequence's keys and values between the cache and the host, before the next step is computed."""

    index: int
    """The sequence's index, by which the host finds them."""
    to: Literal["host", "cache", "nowhere"]
    """`nowhere`: the sequence has ended, and its keys and values on the host are dropped."""
    blocks: tuple[int, ...] = ()
    """Its blocks in the cache, or the last of them: the cache may still have the first ones."""
    tokens: int = 0
    """Tokens in these blocks."""


class GivingWay:
    """Preempts the residents of a ledger, and brings swapped ones back."""

    def __init__(self, ledger: "Ledger", preemption: Preemption | None):
        self._ledger, self._preemption = ledger, preemption
        self.preemptions = 0
        """Number of preemptions so far."""
        self.swapped = 0
        """Number of preemptions so far whose keys and values were copied to the host."""
        self.on_host = 0
        """KV blocks on the host."""
        self._preempted: list[Sequence] = []
        self._swaps: list[Swap] = []

    @property
    def ranks_running(self) -> bool:
        """Return whether the order ranks running sequences too."""
        return self._preemption is not None

    def take_preempted(self) -> list[Sequence]:
        """Return the sequences that were preempted since the last call, in order."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def take_swaps(self) -> tuple[Swap, ...]:
        """Return the copies that come before the next step, in order."""
        swaps, self._swaps = tuple(self._swaps), []
        return swaps

    def victim(self, now: float) -> Sequence:
        """Return the resident that is preempted for lack of blocks: unfinished, and its keys and values have arrived.

        There always is one: the resident that needs blocks. With disaggregated prefill, a whole prompt is booked when
        its prefill is ordered, so `encoding` is empty.
        """
        if self._preemption:
            return self._ranked(now)[-1]
        residents = self._ledger.encoding or self._ledger.decoding
        return next(s for s in reversed(residents) if s.status is not FINISHED and s.kv_arrived_s <= now)

    def _ranked(self, now: float) -> list[Sequence]:
        """Return the unfinished residents in the order."""
        residents = [s for s in (*self._ledger.encoding, *self._ledger.decoding) if s.status is not FINISHED]
        return sorted(residents, key=lambda sequence: self._ledger.waiting.rank(sequence, now))

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Free a resident's blocks: it waits again."""
        ledger, blocks = self._ledger, self._ledger.pool.blocks_for(sequence.cached)
        if self._preemption and 0 < blocks <= self._preemption.host_blocks - self.on_host:
            self._swaps.append(Swap(sequence.index, "host", tuple(sequence.blocks[:blocks]), sequence.cached))
            self.on_host += blocks
            self.swapped += 1
            sequence.swap_out(blocks)
        else:
            sequence.recompute(ledger.encoder_decoder)
        ledger.put_back(sequence, now)
        self._preempted.append(sequence)
        self.preemptions += 1

    def make_way(self, now: float, most: int) -> None:
        """Let residents give way to the first waiting sequence, if it is before them in the order.

        A policy with at most `most` residents calls it before each step. It then admits the sequence; swapped ones are
        residents at once, one after the other.
        """
        waiting = self._ledger.waiting
        while self._preemption and (first := waiting.peek(now)) is not None and first.last_token_s <= now:
            for victim in self._victims(first, now, most):
                self.preempt(victim, now)
            if not first.swapped or self._ledger.residents >= most:
                return
            while not self._has_blocks(first):
                if self._ledger.residents or not self._ledger.pins.remove_newest(first):
                    return
            waiting.pop()
            self._bring_back(first, now)

    def _victims(self, first: Sequence, now: float, most: int) -> list[Sequence]:
        """Return the residents that give way to a waiting sequence, the last in the order first; none if in vain."""
        ledger = self._ledger
        running = len(ledger.encoding) + len(ledger.decoding)
        if running < most and (ledger.residents >= most or self._has_blocks(first)):
            return []  # it has room, now or once the sequences that are leaving have left
        victims, rank = list[Sequence](), ledger.waiting.rank(first, now)
        found, holds, freed = set(ledger.cached_blocks(first)), Counter[int](), 0
        for resident in reversed(self._ranked(now)):
            if ledger.waiting.rank(resident, now) <= rank:
                break
            victims.append(resident)
            freed += self._freed_for(found, resident, holds)
            if running - len(victims) < most and self._has_blocks(first, freed):
                return victims
        return []

    def _freed_for(self, found: set[int], resident: Sequence, holds: Counter[int]) -> int:
        """Return how many blocks this victim frees for a sequence that finds `found` cached; update `holds`.

        `holds` counts how many victims hold each block: a shared one is free once all its holders have given way.
        """
        pool = self._ledger.pool
        if not isinstance(pool, PrefixPool):
            return len(resident.blocks)
        holds.update(resident.blocks)
        return sum(pool.holders(block) == holds[block] and block not in found for block in resident.blocks)

    def _has_blocks(self, sequence: Sequence, more: int = 0) -> bool:
        """Return whether a waiting sequence would find its blocks if `more` blocks were freed."""
        ledger = self._ledger
        need = ledger.missing(self.need(sequence), ledger.cached_blocks(sequence))
        return need <= ledger.pool.available + more

    def need(self, sequence: Sequence) -> int:
        """Return the blocks with which a sequence begins, or goes on if it is swapped."""
        ledger = self._ledger
        need = ledger.admission.blocks(sequence)
        if sequence.swapped:
            need = max(need, ledger.pool.blocks_for(sequence.cached + 1 + ledger.drafted))
        return need

    def _bring_back(self, sequence: Sequence, now: float) -> None:
        """Make a swapped sequence resident, in the state in which it was preempted."""
        ledger = self._ledger
        shared, end = ledger.cached_blocks(sequence), sequence.swapped
        ledger.take_blocks(sequence, self.need(sequence), shared)
        copied = sequence.cached - len(shared) * ledger.pool.block_size
        self._swaps.append(Swap(sequence.index, "cache", tuple(sequence.blocks[len(shared) : end]), copied))
        self.on_host -= sequence.swapped
        sequence.swapped, sequence.status = 0, PREFILL if sequence.to_prefill else DECODE
        (ledger.encoding if sequence.to_prefill else ledger.decoding).append(sequence)
        if ledger.following:
            ledger.following.start(sequence, now)

    def end(self, sequence: Sequence) -> None:
        """Drop the keys and values on the host of a sequence that has ended."""
        if sequence.swapped:
            self._swaps.append(Swap(sequence.index, "nowhere"))
            self.on_host -= sequence.swapped
            sequence.swapped = 0

    def check(self) -> None:
        """Raise AssertionError unless the blocks on the host are those of waiting sequences, and not too many."""
        waiting = sum(sequence.swapped for sequence in self._ledger.waiting if sequence.status is PREEMPTED)
        most = self._preemption.host_blocks if self._preemption else 0
        if waiting != self.on_host or not 0 <= self.on_host <= most:
            raise AssertionError(f"{self.on_host} of {most} blocks are on the host, {waiting} of waiting sequences")
