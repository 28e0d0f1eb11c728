"""Merged KV blocks of models that share devices, and what sharing costs their iterations (SeaLLM)."""

from collections.abc import Sequence as Items

from exegpt.batching.shared_pool import MergedBlocks, MergedPool

ALIKE, UNLIKE = 1.04, 1.08
"""How much longer iterations take on devices that two models share (SeaLLM, Figure 15): below 4 % for three of six
LLMs, below 8 % for all. The larger one where their blocks differ.
"""


def sharing_overhead(block_bytes: Items[int]) -> float:
    """How much longer iterations take of models with KV blocks of so many bytes; nothing for one alone."""
    if len(block_bytes) < 2:
        return 1.0
    return ALIKE if len(set(block_bytes)) == 1 else UNLIKE


def merged_blocks(memory_bytes: float, block_bytes: Items[int], longest: Items[int]) -> MergedBlocks | None:
    """Blocks of the largest model's size; None where they couldn't hold a sequence of `longest` blocks of every model
    at once.
    """
    largest = max(block_bytes)
    total = int(memory_bytes // largest)
    needed = sum(-(-blocks // (largest // own)) for own, blocks in zip(block_bytes, longest, strict=True))
    return MergedBlocks(total, largest) if total >= needed else None


def merged_pools(memory_bytes: float, block_bytes: Items[int], block_size: int) -> list[MergedPool]:
    """A pool of each model, over one memory."""
    blocks = MergedBlocks(int(memory_bytes // max(block_bytes)), max(block_bytes))
    return [MergedPool(blocks, own, block_size) for own in block_bytes]
