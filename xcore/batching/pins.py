"""Pins: cached blocks that waiting sequences hold, so that they find them when they are admitted."""

from collections import Counter
from collections.abc import Iterable

from xcore.batching.kv_pool import KVPool
from xcore.batching.sequence import Sequence


class Pins:
    """The pinned blocks of one pool, in the order of pinning."""

    def __init__(self, pool: KVPool):
        self._pool = pool
        self._blocks: dict[Sequence, list[int]] = {}
        self.held = Counter[int]()
        """Number of sequences that pin each block."""

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences that hold blocks, in the order of pinning."""
        return list(self._blocks)

    def union(self, blocks: Iterable[int]) -> int:
        """Return how many blocks would be pinned together with these."""
        return len(self.held) + sum(block not in self.held for block in blocks)

    def add(self, sequence: Sequence, blocks: list[int]) -> None:
        """Record that a waiting sequence holds blocks."""
        self._blocks[sequence] = blocks
        self.held.update(blocks)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence's pins, if it has any."""
        if sequence not in self._blocks:
            return
        blocks = self._blocks.pop(sequence)
        self._pool.free(blocks)
        for block in blocks:
            self.held[block] -= 1
            if not self.held[block]:
                del self.held[block]

    def remove_newest(self, other: Sequence) -> bool:
        """Remove the newest pins, but not those of `other`; return whether there were any."""
        newest = next((sequence for sequence in reversed(self._blocks) if sequence is not other), None)
        if newest is None:
            return False
        self.remove(newest)
        return True
