"""KV pool: which of a stage's fixed-size cache blocks are free."""

from collections import Counter
from typing import Protocol

from xcore.errors import InputError


def check_size(total: int, block_size: int) -> None:
    """Raise InputError for a pool that can't hold a token."""
    if total < 1 or block_size < 1:
        raise InputError(f"A pool of {total} blocks of {block_size} tokens is not usable: both must be at least 1.")


class KVPool(Protocol):
    """The KV cache's blocks, by number."""

    block_size: int
    """Tokens per block."""

    @property
    def total(self) -> int:
        """Return the number of blocks, free or held."""

    @property
    def available(self) -> int:
        """Return how many blocks `allocate` can give."""

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks that `tokens` tokens need."""

    def allocate(self, count: int) -> list[int]:
        """Return the numbers of `count` free blocks. The caller checks `available` first; MemoryError otherwise."""

    def free(self, blocks: list[int]) -> None:
        """Free blocks that `allocate` gave."""

    def set_total(self, total: int) -> None:
        """Set the number of blocks. With fewer than are held, none is available until enough are freed."""

    def check(self, held: Counter[int]) -> None:
        """Raise AssertionError unless every block is either free or in `held`, with as many holders as it may have."""


class BlockPool:
    """`total` blocks of `block_size` tokens; `allocate` refuses to give more.

    Free and held blocks always add up to `total`.
    """

    def __init__(self, total: int, block_size: int):
        check_size(total, block_size)
        self.total = total
        self.block_size = block_size
        self._returned: list[int] = []
        self._untouched = 0  # the first block that was never held: a pool may have tens of millions

    def set_total(self, total: int) -> None:
        """Set the number of blocks."""
        self.total = total

    @property
    def held(self) -> int:
        """Return how many blocks sequences hold."""
        return self._untouched - len(self._returned)

    @property
    def available(self) -> int:
        """Return how many blocks are free."""
        return self.total - self.held

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks that `tokens` tokens need."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Return the numbers of `count` free blocks. The caller checks `available` first; MemoryError otherwise."""
        if count > self.available:
            raise MemoryError(f"{count} KV blocks were requested, but only {self.available} of {self.total} are free")
        known = max(0, len(self._returned) - count)
        taken = self._returned[known:][::-1]
        del self._returned[known:]
        fresh = range(self._untouched, self._untouched + count - len(taken))
        self._untouched = fresh.stop
        return [*taken, *fresh]

    def free(self, blocks: list[int]) -> None:
        """Free blocks that `allocate` gave."""
        if len(blocks) > self.held:
            raise ValueError(f"{len(blocks)} KV blocks were freed, but only {self.held} were allocated")
        self._returned.extend(reversed(blocks))

    def check(self, held: Counter[int]) -> None:
        """Raise AssertionError unless every block is either free or held by exactly one sequence."""
        if held.total() != len(held) or len(held) != self.held:
            raise AssertionError(f"{held.total()} held + {self.total - self.held} free blocks are not {self.total}")
