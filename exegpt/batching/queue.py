"""The queue of waiting sequences, ordered by a key that may change with time."""

import heapq
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from exegpt.batching.sequence import Sequence


class Order(Protocol):
    """Which waiting sequence comes first."""

    changes: bool
    """Whether keys change while sequences wait: they are then computed again at every new moment."""

    def key(self, sequence: Sequence, now: float) -> Any:
        """Lower is earlier; sequences with equal keys come in the order of their indices."""


class Queue:
    """Waiting sequences. Those whose arrival lies ahead are not in the order yet."""

    def __init__(self, order: Order):
        self.order = order
        self._arriving: list[tuple[float, int, Sequence]] = []
        """A heap by arrival."""
        self._arrived: list[tuple[Any, int, Sequence]] = []
        """A heap by key."""
        self._keyed_s = 0.0
        """When the keys were computed, if they change."""

    def __len__(self) -> int:
        return len(self._arriving) + len(self._arrived)

    def __iter__(self) -> Iterator[Sequence]:
        """In no particular order."""
        for heap in (self._arrived, self._arriving):
            yield from (entry[-1] for entry in heap)

    def push(self, sequence: Sequence) -> None:
        """Let a sequence wait from its arrival on."""
        heapq.heappush(self._arriving, (sequence.arrival_s, sequence.index, sequence))

    def peek(self, now: float) -> Sequence | None:
        """The first sequence that has arrived."""
        if self.order.changes or (self._arriving and self._arriving[0][0] <= now):
            self._update(now)
        return self._arrived[0][-1] if self._arrived else None

    def pop(self) -> Sequence:
        """Remove the sequence that `peek` returned."""
        return heapq.heappop(self._arrived)[-1]

    def first(self, most: int, now: float) -> list[Sequence]:
        """Up to `most` of the sequences that have arrived, in order; they stay in the queue."""
        self._update(now)
        return [entry[-1] for entry in heapq.nsmallest(most, self._arrived)]

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Remove sequences wherever they are."""
        gone = set(map(id, sequences))
        for heap in (self._arrived, self._arriving):
            heap[:] = [entry for entry in heap if id(entry[-1]) not in gone]
            heapq.heapify(heap)

    def drain(self) -> list[Sequence]:
        """Remove all sequences and return them in the order of their indices."""
        waiting = sorted(self, key=lambda sequence: sequence.index)
        self._arriving, self._arrived = [], []
        return waiting

    def next_arrival(self, now: float) -> float | None:
        """When the next sequence arrives after `now`; None where none does."""
        self._update(now)
        return self._arriving[0][0] if self._arriving else None

    def _update(self, now: float) -> None:
        """Take in the sequences that have arrived, and compute keys that change anew."""
        while self._arriving and self._arriving[0][0] <= now:
            sequence = heapq.heappop(self._arriving)[-1]
            heapq.heappush(self._arrived, (self.order.key(sequence, now), sequence.index, sequence))
        if self.order.changes and now != self._keyed_s:
            self._arrived = [(self.order.key(sequence, now), index, sequence) for _, index, sequence in self._arrived]
            heapq.heapify(self._arrived)
            self._keyed_s = now
