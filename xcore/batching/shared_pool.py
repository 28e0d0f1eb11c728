"""Pools of several models over one memory: quotas (MuxServe's head-wise blocks, or slabs) and SeaLLM's merged blocks.

Each model's ledger has a pool of its own kind of blocks. This module counts what the pools take of the common memory.
Plans run on merged blocks or slabs, whose blocks are contiguous. Head-wise blocks, whose parts lie anywhere, are only
simulated.
"""

import math
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Literal

from xcore.batching.kv_pool import BlockPool, check_size
from xcore.errors import InputError
from xcore.specs.model import ModelSpec
from xcore.specs.schedule import Schedule

SLABS = 16
"""Least number of slabs per model, if the memory has as many blocks: a quota moves by a tenth at a time."""
LARGEST_SLAB = 256
"""Most blocks of the largest model in a slab: the memory lost at a slab's end is then negligible."""


class Store:
    """Memory that several pools draw from, in parts of one size."""

    def __init__(self, total: int):
        self.total = total
        self.used = 0

    @property
    def free(self) -> int:
        """Return the number of parts that no pool has allocated."""
        return self.total - self.used


class QuotaPool(BlockPool):
    """Blocks that take some parts of a store each, up to a quota of parts.

    In MuxServe's head-wise blocks, a part is the keys and values of one head of one layer.
    """

    def __init__(self, store: Store, parts: int, block_size: int, quota: int):
        super().__init__(min(quota, store.total) // parts, block_size)
        self._store, self.parts, self.quota = store, parts, quota

    def resize(self, quota: int) -> None:
        """Set another quota, at least the number of held blocks."""
        if quota // self.parts < max(1, self.held):
            raise ValueError(
                f"the quota of {quota} parts is too small: {self.held} blocks of {self.parts} parts are in use"
            )
        self.quota, self.total = quota, min(quota, self._store.total) // self.parts

    def parts_for(self, blocks: int) -> int:
        """Return the parts that `blocks` blocks take."""
        return blocks * self.parts

    @property
    def available(self) -> int:
        """Return the blocks within the quota for which the store has memory."""
        return max(0, min(self.total - self.held, self._store.free // self.parts))

    def allocate(self, count: int) -> list[int]:
        """Return the numbers of `count` blocks; MemoryError if fewer are available."""
        blocks = super().allocate(count)
        self._store.used += count * self.parts
        return blocks

    def free(self, blocks: list[int]) -> None:
        """Free blocks that `allocate` gave."""
        super().free(blocks)
        self._store.used -= len(blocks) * self.parts


class MergedPool:
    """A model's share of merged blocks (SeaLLM).

    A merged block is as large as the largest model's block. It holds as many of the model's own blocks as fit whole,
    and no blocks of other models. A block's number is its start in the memory, counted in pieces. If the memory is a
    tensor (`KVCache.over`), a piece is the keys, or the values, of one layer. `quota` limits the merged blocks of the
    model.
    """

    def __init__(
        self, merged: "MergedBlocks", block_bytes: int, block_size: int, pieces: int = 1, quota: int | None = None
    ):
        if block_bytes > merged.bytes:
            raise InputError(
                f"A block of {block_bytes:,} bytes does not fit in a merged block of {merged.bytes:,} bytes."
            )
        check_size(merged.total, block_size)
        self._merged, self.block_size, self._pieces = merged, block_size, pieces
        self.slots = merged.bytes // block_bytes
        self._apart = merged.bytes * pieces // block_bytes
        """Pieces from one merged block to the next."""
        self.quota = merged.total if quota is None else min(quota, merged.total)
        self._open: dict[int, list[int]] = {}
        """Merged blocks of this model with free slots, and these slots."""
        self._own = 0
        """Number of merged blocks of this model."""

    @property
    def total(self) -> int:
        """Return the number of blocks in all memory that this model may use."""
        return self.quota * self.slots

    @property
    def held(self) -> int:
        """Return the blocks that sequences hold."""
        return self._own * self.slots - self._free_slots

    @property
    def _free_slots(self) -> int:
        return sum(map(len, self._open.values()))

    @property
    def available(self) -> int:
        """Return the free slots in this model's merged blocks and in free merged blocks."""
        return self._free_slots + min(self._merged.free, self.quota - self._own) * self.slots

    def parts_for(self, blocks: int) -> int:
        """Return how many merged blocks the model has with `blocks` blocks of its own; never fewer than now."""
        return max(self._own, -(-blocks // self.slots))

    def resize(self, quota: int) -> None:
        """Set another quota, at least the number of merged blocks that the model has."""
        if quota < max(1, self._own):
            raise ValueError(f"the quota of {quota} merged blocks is too small: the model holds {self._own}")
        self.quota = quota

    def set_total(self, total: int) -> None:
        """Set the quota to the merged blocks that hold `total` blocks of the model's own, if that many exist."""
        self.quota = min(-(-total // self.slots), self._merged.total)

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks that `tokens` tokens need."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Return the numbers of `count` blocks, first in own merged blocks; MemoryError if too few are available."""
        if count > self.available:
            raise MemoryError(f"{count} KV blocks were requested, but only {self.available} of {self.total} are free")
        if self.slots == 1:  # no merged block is ever half full
            self._own += count
            return [block * self._apart for block in self._merged.take(count)]
        taken: list[int] = []
        while len(taken) < count:
            if not self._open:
                (fresh,) = self._merged.take(1)
                self._open[fresh] = list(range(self.slots))
                self._own += 1
            block, slots = next(iter(self._open.items()))
            some = slots[: count - len(taken)]
            taken += [block * self._apart + slot * self._pieces for slot in some]
            if len(some) == len(slots):
                del self._open[block]
            else:
                self._open[block] = slots[len(some) :]
        return taken

    def free(self, blocks: list[int]) -> None:
        """Free blocks that `allocate` gave; a merged block whose slots are all free returns to the common memory."""
        if self.slots == 1:
            if len(blocks) > self._own:
                raise ValueError(f"{len(blocks)} KV blocks were freed, but only {self._own} were allocated")
            self._own -= len(blocks)
            self._merged.give([block // self._apart for block in blocks])
            return
        for block in blocks:
            merged, begin = divmod(block, self._apart)
            slot, slots = begin // self._pieces, self._open.setdefault(merged, [])
            if slot in slots:
                raise ValueError(f"KV block {block} was freed twice")
            slots.append(slot)
            if len(slots) == self.slots:
                del self._open[merged]
                self._own -= 1
                self._merged.give([merged])

    def check(self, held: Counter[int]) -> None:
        """Raise AssertionError unless the slots of the model's merged blocks are free or held by one sequence each."""
        if held.total() != len(held) or len(held) != self.held:
            raise AssertionError(
                f"{held.total()} held + {self._free_slots} free slots are not {self._own} × {self.slots}"
            )


class MergedBlocks:
    """The merged blocks of one memory: `total` blocks of `bytes` bytes."""

    def __init__(self, total: int, bytes: int):
        self.total, self.bytes = total, bytes
        self._pool = BlockPool(total, 1)

    @staticmethod
    def within(memory_bytes: float, sizes: Iterable[tuple[int, int]]) -> "MergedBlocks":
        """Return the merged blocks that fit in a memory, for blocks of these (bytes, pieces); InputError for none."""
        bytes = merged_bytes(sizes)
        total = int(memory_bytes // bytes)
        if total < 1:
            raise InputError(
                f"A memory of {memory_bytes:,.0f} bytes can't hold a merged block of {bytes:,} bytes: increase the "
                "memory."
            )
        return MergedBlocks(total, bytes)

    @property
    def free(self) -> int:
        """Return the number of merged blocks that no model has."""
        return self._pool.available

    def take(self, count: int) -> list[int]:
        """Take `count` free merged blocks; the most recently returned ones come first."""
        return self._pool.allocate(count)

    def give(self, blocks: list[int]) -> None:
        """Return merged blocks to the memory."""
        self._pool.free(blocks)


def block_of(spec: ModelSpec, block_size: int, kv_dtype: str, tp: int = 1) -> tuple[int, int]:
    """Return the bytes of a model's KV block on one of `tp` devices, and its pieces: keys and values of each layer."""
    return block_size * spec.layers * spec.kv_bytes(tp, kv_dtype), 2 * spec.layers


def merged_bytes(sizes: Iterable[tuple[int, int]]) -> int:
    """Return the bytes of a merged block for models' blocks of these (bytes, pieces).

    It is as large as the largest block, and a whole number of pieces of each model.
    """
    sizes = list(sizes)
    piece = math.lcm(*(size // pieces for size, pieces in sizes))
    return -(-max(size for size, _ in sizes) // piece) * piece


def least_memory(sizes: Items[tuple[int, int]], sequences: Items[int]) -> int:
    """Return the bytes of merged blocks that hold one sequence of each model at once, of `sequences` blocks each."""
    bytes = merged_bytes(sizes)
    return bytes * sum(-(-blocks // (bytes // size)) for (size, _), blocks in zip(sizes, sequences, strict=True))


def shared_pools(
    schedules: Items[Schedule], pool: Literal["quotas", "merged"]
) -> tuple[MergedBlocks, list[MergedPool]]:
    """Return one memory on a device for the KV blocks of these one-stage schedules, and each schedule's pool."""
    return (quota_pools if pool == "quotas" else merged_pools)(schedules)


def least_quota(schedule: Schedule) -> int:
    """Return the blocks that a schedule's quota keeps: those of its workload's longest sequence."""
    lengths = schedule.workload
    longest = lengths.input.max + lengths.output.max
    longest = min(schedule.model.spec.longest_request or longest, longest)
    return min(schedule.kv_blocks, -(-longest // schedule.block_size))


def merged_pools(schedules: Items[Schedule]) -> tuple[MergedBlocks, list[MergedPool]]:
    """Return one memory with the total size of these schedules' KV blocks on a device, and each schedule's pool.

    Each schedule has one stage.
    """
    sizes = [*map(block_size, schedules)]
    memory_bytes = sum(s.kv_blocks * size for s, (size, _) in zip(schedules, sizes, strict=True))
    merged = MergedBlocks.within(memory_bytes, sizes)
    pairs = zip(schedules, sizes, strict=True)
    return merged, [MergedPool(merged, size, s.block_size, pieces) for s, (size, pieces) in pairs]


def quota_pools(schedules: Items[Schedule]) -> tuple[MergedBlocks, list[MergedPool]]:
    """Return one memory for the KV blocks of these one-stage schedules on a device, and each schedule's pool.

    Each pool has a quota of at least as many blocks as its schedule has. The memory is in slabs: merged blocks that
    hold many blocks of a model. Slabs are large enough to waste little memory, and small enough to move quota between
    models.
    """
    sizes = [*map(block_size, schedules)]
    slab = _slab_bytes(sizes, [s.kv_blocks for s in schedules])
    quotas = [_slabs(slab, size, s.kv_blocks) for s, (size, _) in zip(schedules, sizes, strict=True)]
    merged = MergedBlocks(sum(quotas), slab)
    rows = zip(schedules, sizes, quotas, strict=True)
    return merged, [MergedPool(merged, size, s.block_size, pieces, quota) for s, (size, pieces), quota in rows]


def block_size(schedule: Schedule) -> tuple[int, int]:
    """Return the bytes and pieces of a one-stage schedule's KV block on one device."""
    return block_of(schedule.model.spec, schedule.block_size, schedule.kv_dtype, schedule.stages[0].tp)


def _slabs(slab: int, size: int, blocks: int) -> int:
    """Return the slabs of `slab` bytes that `blocks` blocks of `size` bytes need."""
    return -(-blocks // (slab // size))


def _slab_bytes(sizes: Items[tuple[int, int]], blocks: Items[int]) -> int:
    """Return the slab size in bytes that needs the least memory for each model's `blocks`, if small enough."""
    step = merged_bytes(sizes)
    memory_bytes = sum(count * size for count, (size, _) in zip(blocks, sizes, strict=True))
    largest = max(1, min(LARGEST_SLAB, memory_bytes // (SLABS * len(sizes) * step)))

    def need(slab: int) -> int:
        return slab * sum(_slabs(slab, size, count) for count, (size, _) in zip(blocks, sizes, strict=True))

    return min((factor * step for factor in range(1, largest + 1)), key=need)
