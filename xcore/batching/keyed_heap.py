"""Heaps with replaceable keys: of sequences, and of groups of sequences whose keys rise."""

from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush, nsmallest
from typing import Generic, TypeVar

from xcore.batching.order import FollowingOrder
from xcore.batching.sequence import Sequence

T = TypeVar("T")


class KeyedHeap(Generic[T]):
    """Items by key, then by name. An entry whose key was replaced stays in the heap until it comes first."""

    def __init__(self) -> None:
        self._heap: list[tuple[object, Hashable, T]] = []
        self._entries: dict[Hashable, tuple[object, Hashable, T]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[T]:
        """Iterate in no particular order."""
        return (entry[-1] for entry in self._entries.values())

    def put(self, name: Hashable, key: object, item: T) -> None:
        """Add an item, or replace its key."""
        entry = self._entries[name] = (key, name, item)
        heappush(self._heap, entry)

    def discard(self, name: Hashable) -> None:
        """Remove an item, if it is there."""
        if self._entries.pop(name, None) and len(self._heap) > 2 * len(self._entries) + 8:
            self._rebuild()

    def first(self) -> tuple[object, Hashable, T] | None:
        """Return the key, name and item of the first entry."""
        heap, entries = self._heap, self._entries
        while heap:
            if entries.get(heap[0][1]) is heap[0]:
                return heap[0]
            heappop(heap)
        return None

    def smallest(self, most: int) -> list[T]:
        """Return up to `most` items in order."""
        return [entry[-1] for entry in self.entries(most)]

    def entries(self, most: int) -> list[tuple[object, Hashable, T]]:
        """Return the keys, names and items of up to `most` entries in order."""
        return nsmallest(most, self._entries.values())

    def rekey(self, key: Callable[[T], object]) -> None:
        """Compute all keys again."""
        self._entries = {name: (key(item), name, item) for _, name, item in self._entries.values()}
        self._rebuild()

    def _rebuild(self) -> None:
        self._heap = list(self._entries.values())
        heapify(self._heap)


class GroupedHeap:
    """Sequences by their groups' keys, then by their own keys.

    A group's key is looked up when the group comes first. Keys only rise, so the earlier key is never too high.
    """

    def __init__(self, order: FollowingOrder):
        self._order = order
        self._groups: dict[Hashable, KeyedHeap[Sequence]] = {}
        self._group_of: dict[Hashable, Hashable] = {}
        self._heads: KeyedHeap[Hashable] = KeyedHeap()

    def __len__(self) -> int:
        return len(self._group_of)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._group_of

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate in no particular order."""
        for group in self._groups.values():
            yield from group

    def put(self, name: Hashable, key: object, item: Sequence) -> None:
        """Add a sequence, or replace its key and its group."""
        self.discard(name)
        group = self._group_of[name] = self._order.group(item)
        members = self._groups.setdefault(group, KeyedHeap())
        members.put(name, key, item)
        head = members.first()
        if head and head[-1] is item:
            self._heads.put(group, self._head_key(group, head), group)

    def discard(self, name: Hashable) -> None:
        """Remove a sequence, if it is there."""
        if name not in self._group_of:
            return
        group = self._group_of.pop(name)
        self._groups[group].discard(name)
        if not self._groups[group]:
            del self._groups[group]
            self._heads.discard(group)

    def first(self) -> tuple[object, Hashable, Sequence] | None:
        """Return the key, name and item of the first entry."""
        while top := self._heads.first():
            head = self._groups[top[1]].first()
            assert head
            current = self._head_key(top[1], head)
            if current == top[0]:
                return head
            self._heads.put(top[1], current, top[1])
        return None

    def smallest(self, most: int) -> list[Sequence]:
        """Return up to `most` sequences in order, by the groups' present keys."""
        firsts = []
        for group, members in self._groups.items():
            key = self._order.group_key(group)
            firsts += [((key, *entry[:2]), entry[-1]) for entry in members.entries(most)]
        return [sequence for _, sequence in nsmallest(most, firsts, key=lambda pair: pair[0])]

    def rekey(self, key: Callable[[Sequence], object]) -> None:
        """Compute all keys again."""
        for sequence in list(self):
            self.put(sequence.index, key(sequence), sequence)

    def _head_key(self, group: Hashable, head: tuple[object, Hashable, Sequence]) -> tuple[object, object, Hashable]:
        return self._order.group_key(group), head[0], head[1]
