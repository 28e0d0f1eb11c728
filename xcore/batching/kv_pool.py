"""KV pool: which of a stage's fixed-size cache blocks are free."""

from collections import Counter
from typing import Protocol

from xcore.errors import InputError


def check_size(total: int, block_size: int) -> None:
    """InputError for a pool that can't hold a token."""
    if total < 1 or block_size < 1:
        raise InputError(f"A pool of {total} blocks of {block_size} tokens is not usable: both must be at least 1.")


class KVPool(Protocol):
    """Blocks of the KV cache by number."""

    block_size: int
    """Tokens of a block."""

    @property
    def total(self) -> int:
        """Blocks, were none held."""

    @property
    def available(self) -> int:
        """How many blocks `allocate` can give."""

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens need."""

    def allocate(self, count: int) -> list[int]:
        """`count` blocks by number. The caller has checked `available` first; MemoryError otherwise."""

    def free(self, blocks: list[int]) -> None:
        """Return blocks that `allocate` gave."""

    def check(self, held: Counter[int]) -> None:
        """Raise AssertionError unless every block is either free or in `held`, with as many holders as it may have."""


class BlockPool:
    """`total` blocks of `block_size` tokens. Refuses rather than overflows; free plus held is always the total."""

    def __init__(self, total: int, block_size: int):
        check_size(total, block_size)
        self.total = total
        self.block_size = block_size
        self._returned: list[int] = []
        self._untouched = 0  # the first of those that nobody has held yet: a pool may have tens of millions

    @property
    def held(self) -> int:
        """How many blocks sequences hold."""
        return self._untouched - len(self._returned)

    @property
    def available(self) -> int:
        """How many blocks nobody holds."""
        return self.total - self.held

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens need."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks by number. The caller has checked `available` first; MemoryError otherwise."""
        if count > self.available:
            raise MemoryError(f"{count} KV blocks were asked for, {self.available} of {self.total} are free")
        known = max(0, len(self._returned) - count)
        taken = self._returned[known:][::-1]
        del self._returned[known:]
        fresh = range(self._untouched, self._untouched + count - len(taken))
        self._untouched = fresh.stop
        return [*taken, *fresh]

    def free(self, blocks: list[int]) -> None:
        """Return blocks that `allocate` gave."""
        if len(blocks) > self.held:
            raise ValueError(f"{len(blocks)} KV blocks came back, but only {self.held} were held")
        self._returned.extend(reversed(blocks))

    def check(self, held: Counter[int]) -> None:
        """Raise AssertionError unless every block is either free or held by exactly one sequence."""
        if held.total() != len(held) or len(held) != self.held:
            raise AssertionError(f"{held.total()} held + {self.total - self.held} free blocks are not {self.total}")
