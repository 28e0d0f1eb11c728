"""KV blocks: which of a stage's fixed-size pieces of cache are free. Pure bookkeeping, no tensor."""

from exegpt.errors import InputError


class BlockPool:
    """`total` blocks of `block_size` tokens. Refuses rather than overflows; free plus held is always the total."""

    def __init__(self, total: int, block_size: int):
        if total < 1 or block_size < 1:
            raise InputError(f"A pool of {total} blocks of {block_size} tokens is not usable: both must be at least 1.")
        self.total = total
        self.block_size = block_size
        self._free = list(range(total - 1, -1, -1))

    @property
    def free(self) -> int:
        """How many blocks nobody holds."""
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens need."""
        return -(-tokens // self.block_size)

    def take(self, count: int) -> list[int]:
        """`count` blocks by number. The caller has asked `free` first; MemoryError otherwise."""
        if count > len(self._free):
            raise MemoryError(f"{count} KV blocks were asked for, {len(self._free)} of {self.total} are free")
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken[::-1]

    def give_back(self, blocks: list[int]) -> None:
        """Return blocks that `take` handed out."""
        if len(self._free) + len(blocks) > self.total:
            raise ValueError(f"{len(blocks)} KV blocks came back, but only {self.total - len(self._free)} were held")
        self._free.extend(reversed(blocks))
