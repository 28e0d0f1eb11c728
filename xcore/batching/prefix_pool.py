"""Prefix pool: KV blocks that outlive their sequences and are found again by their contents (vLLM's prefix caching).

A full block is published under a key that stands for its tokens and all tokens before them. A sequence that begins with
the same tokens shares the block instead of computing it again. A block that no sequence holds is free, and keeps its
contents until it is allocated. Unpublished blocks are allocated first, then those that were freed longest ago. A
sequence's blocks are freed last first, so that the end of a prefix is lost before its beginning.

A salt enters the key of the first block, and so all keys after it: only sequences with the same salt share blocks.
"""

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Items

from xcore.batching.kv_pool import check_size


def extend_keys(keys: list[bytes], tokens: Items[int], block_size: int, salt: str | None = None) -> None:
    """Append the keys of full blocks that `keys` lacks; `tokens` are all known tokens of a sequence.

    Each key hashes its block's tokens and the previous key, so equal keys mean equal prefixes, of sequences with the
    same salt.
    """
    for end in range((len(keys) + 1) * block_size, len(tokens) + 1, block_size):
        before = keys[-1] if keys else _start(salt)
        keys.append(hashlib.sha256(before + array("q", tokens[end - block_size : end]).tobytes()).digest())


def _start(salt: str | None) -> bytes:
    """Return the initial key, which stands for the previous key of a first block."""
    return b"" if salt is None else hashlib.sha256(salt.encode()).digest()


class PrefixPool:
    """`total` blocks of `block_size` tokens, which several sequences may hold. A `KVPool`."""

    def __init__(self, total: int, block_size: int):
        check_size(total, block_size)
        self.total = total
        self.block_size = block_size
        self._untouched = 0  # the first block that was never held, as in `BlockPool`
        self._unpublished: list[int] = []
        """Free blocks without a key."""
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Free published blocks; the one freed first is at the front."""
        self._holders: dict[int, int] = {}
        """Number of sequences that hold each held block."""
        self._keys: dict[int, Hashable] = {}
        """Key of each published block."""
        self._published: dict[Hashable, OrderedDict[int, None]] = {}
        """Blocks of each key, in the order of publishing: equal ones may be computed twice."""
        self._changes: dict[Hashable, bool] | None = None
        """Changed keys, and whether they are in the cache now; None: changes aren't recorded."""

    def record_changes(self) -> None:
        """Record from now on which keys can be found, for `take_changes`."""
        self._changes = {}

    def take_changes(self) -> tuple[list[Hashable], list[Hashable]]:
        """Return the keys that entered and left the cache since the last call; none unless changes are recorded."""
        changes = self._changes or {}
        if changes:
            self._changes = {}
        return [key for key, found in changes.items() if found], [key for key, found in changes.items() if not found]

    def _changed(self, key: Hashable, found: bool) -> None:
        if self._changes is not None:
            self._changes[key] = found

    def set_total(self, total: int) -> None:
        """Set the number of blocks."""
        self.total = total

    @property
    def available(self) -> int:
        """Return how many blocks are free."""
        return len(self._unpublished) + len(self._kept) + self.total - self._untouched

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks that `tokens` tokens need."""
        return -(-tokens // self.block_size)

    def holders(self, block: int) -> int:
        """Return how many hold a held block: sequences and pins."""
        return self._holders[block]

    def allocate(self, count: int) -> list[int]:
        """Return the numbers of `count` free blocks, whose contents are lost; MemoryError if fewer are `available`."""
        if count > self.available:
            raise MemoryError(f"{count} KV blocks were asked for, {self.available} of {self.total} are free")
        blocks = [self._take() for _ in range(count)]
        self._holders.update(dict.fromkeys(blocks, 1))
        return blocks

    def _take(self) -> int:
        """Take the free block of least use: unpublished, then never held, then freed longest ago."""
        if self._unpublished:
            return self._unpublished.pop()
        if self._untouched < self.total:
            self._untouched += 1
            return self._untouched - 1
        block, _ = self._kept.popitem(last=False)
        self._forget(block)
        return block

    def _forget(self, block: int) -> None:
        key = self._keys.pop(block)
        equal = self._published[key]
        del equal[block]
        if not equal:
            del self._published[key]
            self._changed(key, False)

    def free(self, blocks: list[int]) -> None:
        """Release one sequence's blocks, given in the order of its tokens."""
        for block in reversed(blocks):
            holders = self._holders.pop(block, 0)
            if not holders:
                raise ValueError(f"KV block {block} was freed, but no sequence held it")
            if holders > 1:
                self._holders[block] = holders - 1
            elif block in self._keys:
                self._kept[block] = None
            else:
                self._unpublished.append(block)

    def publish(self, block: int, key: Hashable) -> None:
        """Publish a held block under a key; ValueError if the block is free or has a key already."""
        if block not in self._holders or block in self._keys:
            raise ValueError(f"KV block {block} can't be published: it is free, or it was already published")
        self._keys[block] = key
        self._published.setdefault(key, OrderedDict())[block] = None
        self._changed(key, True)

    def restore(self, keys: Items[Hashable]) -> None:
        """Put blocks with these keys into the cache, while blocks are free."""
        missing = keys[len(self.find(keys)) :][: self.available]
        blocks = self.allocate(len(missing))
        for block, key in zip(blocks, missing, strict=True):
            self.publish(block, key)
        self.free(blocks)

    def withdraw(self, keys: Iterable[Hashable]) -> None:
        """Withdraw these keys, so that no block is found by them."""
        for key in keys:
            if key in self._published:
                self._changed(key, False)
            for block in self._published.pop(key, ()):
                del self._keys[block]
                if block in self._kept:
                    del self._kept[block]
                    self._unpublished.append(block)

    def find(self, keys: Iterable[Hashable]) -> list[int]:
        """Return the longest run of blocks published under these keys, from the first key on."""
        blocks = []
        for key in keys:
            equal = self._published.get(key)
            if equal is None:
                break
            blocks.append(next(iter(equal)))
        return blocks

    def free_among(self, blocks: Iterable[int]) -> int:
        """Return how many of these published blocks are free: holding them reduces `available` by that many."""
        return sum([block in self._kept for block in blocks])

    def hold(self, blocks: Iterable[int]) -> None:
        """Let one more sequence hold these published blocks."""
        for block in blocks:
            self._kept.pop(block, None)
            self._holders[block] = self._holders.get(block, 0) + 1

    def check(self, held: Counter[int]) -> None:
        """Raise AssertionError unless `held` counts the holders of each held block, and all other blocks are free."""
        if held != Counter(self._holders):
            raise AssertionError(f"sequences hold {dict(held)}, but the pool counts {self._holders}")
        if sorted([*self._unpublished, *self._kept, *held]) != list(range(self._untouched)):
            raise AssertionError(f"{len(held)} held + {self.available} free blocks are not {self.total}")
        published = {block: key for key, blocks in self._published.items() for block in blocks}
        if published != self._keys or not self._kept.keys() <= published.keys() <= held.keys() | self._kept.keys():
            raise AssertionError(f"blocks {sorted(published)} are published, but the pool keeps {list(self._kept)}")
