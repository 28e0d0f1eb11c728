"""Pins: cached blocks that are held for waiting sequences and expected calls, which find them when they begin."""

from collections import Counter
from collections.abc import Hashable

from xcore.batching.kv_pool import KVPool
from xcore.batching.prefix_pool import PrefixPool


class Pins:
    """The pinned blocks of one pool, in the order of pinning."""

    def __init__(self, pool: KVPool):
        self._pool = pool
        self._blocks: dict[Hashable, list[int]] = {}
        self.held = Counter[int]()
        """Number of holders of each block: waiting sequences, and calls that are expected."""

    @property
    def holders(self) -> list[Hashable]:
        """The holders of blocks, in the order of pinning."""
        return list(self._blocks)

    def add(self, holder: Hashable, blocks: list[int], most: int) -> int:
        """Pin published blocks for a holder, unless more than `most` would be pinned then; return how many it holds."""
        pinned = len(self.held) + sum(block not in self.held for block in blocks)
        if not blocks or pinned > most or not isinstance(self._pool, PrefixPool):
            return 0
        self._pool.hold(blocks)
        self._blocks[holder] = blocks
        self.held.update(blocks)
        return len(blocks)

    def remove(self, holder: Hashable) -> None:
        """End a hold, if there is one."""
        if holder not in self._blocks:
            return
        blocks = self._blocks.pop(holder)
        self._pool.free(blocks)
        for block in blocks:
            self.held[block] -= 1
            if not self.held[block]:
                del self.held[block]

    def remove_newest(self, other: Hashable) -> bool:
        """End the hold that was added last, but not that of `other`; return whether there was any."""
        newest = next((holder for holder in reversed(self._blocks) if holder is not other), None)
        if newest is None:
            return False
        self.remove(newest)
        return True
