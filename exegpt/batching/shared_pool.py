"""Pools of several models over one memory: MuxServe's quotas of head-wise blocks, SeaLLM's merged blocks.

Each model's ledger has a pool of its own kind of blocks; what they take of the memory that the models have together is
counted here.
"""

from collections import Counter

from exegpt.batching.kv_pool import check_size
from exegpt.errors import InputError


class Store:
    """Memory that several pools draw from, in parts of one size."""

    def __init__(self, total: int):
        self.total = total
        self.used = 0

    @property
    def free(self) -> int:
        """Parts that no pool has."""
        return self.total - self.used


class QuotaPool:
    """Blocks that take some parts of a store each, up to a quota of parts (MuxServe's head-wise blocks: the keys and
    values of one head of one layer are a part).
    """

    def __init__(self, store: Store, parts: int, block_size: int, quota: int):
        check_size(quota // parts, block_size)
        self._store, self._parts = store, parts
        self.block_size, self.quota = block_size, quota
        self._returned: list[int] = []
        self._untouched = 0
        self._held = 0

    @property
    def total(self) -> int:
        """Blocks of the quota."""
        return min(self.quota, self._store.total) // self._parts

    @property
    def held(self) -> int:
        """Blocks that sequences hold."""
        return self._held

    @property
    def available(self) -> int:
        """Blocks within the quota that the store has room for."""
        return max(0, min(self.total - self._held, self._store.free // self._parts))

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens need."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks by number; MemoryError for more than are available."""
        if count > self.available:
            raise MemoryError(f"{count} KV blocks were asked for, {self.available} of {self.total} are free")
        known = max(0, len(self._returned) - count)
        taken = self._returned[known:]
        del self._returned[known:]
        fresh = range(self._untouched, self._untouched + count - len(taken))
        self._untouched = fresh.stop
        self._held += count
        self._store.used += count * self._parts
        return [*taken, *fresh]

    def free(self, blocks: list[int]) -> None:
        """Return blocks that `allocate` gave."""
        if len(blocks) > self._held:
            raise ValueError(f"{len(blocks)} KV blocks came back, but only {self._held} were held")
        self._returned += blocks
        self._held -= len(blocks)
        self._store.used -= len(blocks) * self._parts

    def check(self, held: Counter[int]) -> None:
        """Raise AssertionError unless the blocks in `held` are those that were given, one holder each."""
        if held.total() != len(held) or len(held) != self._held:
            raise AssertionError(f"{held.total()} blocks are held, and {self._held} were given")


class MergedPool:
    """A model's share of merged blocks, each as large as the largest model's block: as many of its own blocks lie in
    one as fit whole, and a merged block has those of one model alone (SeaLLM). Block `b` lies in slot `b % slots` of
    the merged block `b // slots`.
    """

    def __init__(self, merged: "MergedBlocks", block_bytes: int, block_size: int):
        if block_bytes > merged.bytes:
            raise InputError(f"A block of {block_bytes:,} bytes fits no merged block of {merged.bytes:,} bytes.")
        check_size(merged.total, block_size)
        self._merged, self.block_size = merged, block_size
        self.slots = merged.bytes // block_bytes
        self._open: dict[int, list[int]] = {}
        """Merged blocks of this model with free slots, and those."""
        self._own = 0
        """Merged blocks of this model."""

    @property
    def total(self) -> int:
        """Blocks, had this model all the memory."""
        return self._merged.total * self.slots

    @property
    def available(self) -> int:
        """Free slots in blocks of its own, and those of free merged blocks."""
        return sum(map(len, self._open.values())) + self._merged.free * self.slots

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens need."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks by number, merged blocks of its own first; MemoryError for more than are available."""
        if count > self.available:
            raise MemoryError(f"{count} KV blocks were asked for, {self.available} of {self.total} are free")
        if self.slots == 1:  # no merged block is ever half full
            self._own += count
            return self._merged.take_some(count)
        taken: list[int] = []
        while len(taken) < count:
            if not self._open:
                self._open[self._merged.take()] = list(range(self.slots))
                self._own += 1
            block, slots = next(iter(self._open.items()))
            some = slots[: count - len(taken)]
            taken += [block * self.slots + slot for slot in some]
            if len(some) == len(slots):
                del self._open[block]
            else:
                self._open[block] = slots[len(some) :]
        return taken

    def free(self, blocks: list[int]) -> None:
        """Return blocks that `allocate` gave; a merged block whose slots are all free is every model's again."""
        if self.slots == 1:
            if len(blocks) > self._own:
                raise ValueError(f"{len(blocks)} KV blocks came back, but only {self._own} were held")
            self._own -= len(blocks)
            self._merged.give_some(blocks)
            return
        for block in blocks:
            merged, slot = divmod(block, self.slots)
            slots = self._open.setdefault(merged, [])
            if slot in slots:
                raise ValueError(f"KV block {block} came back twice")
            slots.append(slot)
            if len(slots) == self.slots:
                del self._open[merged]
                self._own -= 1
                self._merged.give(merged)

    def check(self, held: Counter[int]) -> None:
        """Raise AssertionError unless the slots of its merged blocks are free or held by one sequence each."""
        free = sum(map(len, self._open.values()))
        if held.total() != len(held) or len(held) + free != self._own * self.slots:
            raise AssertionError(f"{held.total()} held + {free} free slots are not {self._own} × {self.slots}")


class MergedBlocks:
    """The merged blocks of one memory: `total` of `bytes` bytes."""

    def __init__(self, total: int, bytes: int):
        self.total, self.bytes = total, bytes
        self._returned: list[int] = []
        self._untouched = 0

    @property
    def free(self) -> int:
        """Merged blocks that no model has."""
        return len(self._returned) + self.total - self._untouched

    def take(self) -> int:
        """A free merged block."""
        if self._returned:
            return self._returned.pop()
        self._untouched += 1
        return self._untouched - 1

    def take_some(self, count: int) -> list[int]:
        """Free merged blocks, as `take` would give them one by one."""
        known = max(0, len(self._returned) - count)
        taken = self._returned[known:][::-1]
        del self._returned[known:]
        fresh = range(self._untouched, self._untouched + count - len(taken))
        self._untouched = fresh.stop
        return [*taken, *fresh]

    def give(self, block: int) -> None:
        """Return one."""
        self._returned.append(block)

    def give_some(self, blocks: list[int]) -> None:
        """Return several."""
        self._returned += blocks
