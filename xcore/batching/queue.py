"""The queue of waiting sequences, ordered by a key that may change with time."""

import heapq
from collections.abc import Iterable, Iterator
from math import inf

from xcore.batching.keyed_heap import GroupedHeap, KeyedHeap
from xcore.batching.order import FollowingOrder, Order
from xcore.batching.sequence import Sequence


class Queue:
    """Waiting sequences in order. A sequence with a future arrival enters the order at that time."""

    def __init__(self, order: Order):
        self.order = order
        self.by_arrival = bool(getattr(order, "by_arrival", False))
        """Whether the order is that of arrival, so that exchanging neighbours breaks no promise."""
        self._following = order if isinstance(order, FollowingOrder) else None
        self._arriving: list[tuple[float, int, Sequence]] = []
        """Heap of the sequences that arrive later, by arrival."""
        self._arrived = self._empty()
        """Heap of the arrived sequences, by key."""
        self._keyed_s = 0.0
        """Time for which the keys were computed, if they change."""

    def _empty(self) -> KeyedHeap[Sequence] | GroupedHeap:
        return GroupedHeap(self._following) if self._following and self._following.grouped else KeyedHeap()

    def __len__(self) -> int:
        return len(self._arriving) + len(self._arrived)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate in no particular order."""
        yield from self._arrived
        yield from (entry[-1] for entry in self._arriving)

    def arrived(self, now: float) -> int:
        """Return how many sequences have arrived."""
        self._update(now)
        return len(self._arrived)

    @property
    def any_arrived(self) -> bool:
        """Return whether a sequence has arrived, as of the last look at the queue."""
        return bool(len(self._arrived))

    @property
    def unsteady(self) -> bool:
        """Return whether the first sequence may change although no sequence has arrived or left."""
        return len(self._arrived) > 1 and (self.order.changes or self._following is not None)

    def push(self, sequence: Sequence, now: float = -inf) -> None:
        """Enqueue a sequence from its arrival on; at once if that isn't after `now`."""
        if sequence.arrival_s <= now:
            return self._insert(sequence, now)
        heapq.heappush(self._arriving, (sequence.arrival_s, sequence.index, sequence))

    def peek(self, now: float) -> Sequence | None:
        """Return the first sequence that has arrived."""
        if self.order.changes or self._following or (self._arriving and self._arriving[0][0] <= now):
            self._update(now)
        first = self._arrived.first()
        return first[-1] if first else None

    def rank(self, sequence: Sequence, now: float) -> tuple[object, ...]:
        """Return the place in the order of a waiting or running sequence; lower is earlier."""
        key = self.order.key(sequence, now), sequence.index
        if self._following and self._following.grouped:
            return self._following.group_key(self._following.group(sequence)), *key
        return key

    def pop(self) -> Sequence:
        """Remove the sequence that `peek` returned."""
        first = self._arrived.first()
        if first is None:
            raise IndexError("no sequence has arrived")
        self._arrived.discard(first[1])
        return first[-1]

    def first(self, most: int, now: float) -> list[Sequence]:
        """Return up to `most` of the arrived sequences, in order; they stay in the queue."""
        self._update(now)
        return self._arrived.smallest(most)

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Remove sequences, whether or not they have arrived."""
        arriving = set()
        for sequence in sequences:
            if sequence.index in self._arrived:
                self._arrived.discard(sequence.index)
            else:
                arriving.add(sequence.index)
        if arriving:
            self._arriving = [entry for entry in self._arriving if entry[1] not in arriving]
            heapq.heapify(self._arriving)

    def drain(self) -> list[Sequence]:
        """Remove all sequences and return them in the order of their indices."""
        waiting = sorted(self, key=lambda sequence: sequence.index)
        self._arriving, self._arrived = [], self._empty()
        return waiting

    def next_arrival(self, now: float) -> float | None:
        """Return when the next sequence arrives after `now`; None if none does."""
        self._update(now)
        return self._arriving[0][0] if self._arriving else None

    def _insert(self, sequence: Sequence, now: float) -> None:
        if self._following:
            self._following.wait(sequence, now)
        self._arrived.put(sequence.index, self.order.key(sequence, now), sequence)

    def _update(self, now: float) -> None:
        """Move the arrived sequences into the order, and recompute keys that change."""
        while self._arriving and self._arriving[0][0] <= now:
            self._insert(heapq.heappop(self._arriving)[-1], now)
        if self._following:
            for sequence in self._following.due(now):
                if sequence.index in self._arrived:
                    self._arrived.put(sequence.index, self.order.key(sequence, now), sequence)
        if self.order.changes and now != self._keyed_s:
            self._arrived.rekey(lambda sequence: self.order.key(sequence, now))
            self._keyed_s = now
