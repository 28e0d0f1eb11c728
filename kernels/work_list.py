"""The work list of decoding attention on a GPU: the keys of a batch dealt evenly to a fixed number of programs.

Sequences lie one after the other on a line of tiles of `TILE` keys. The line is split into equal shares, as stream-K
splits the tiles of a matrix product. Programs are therefore busy for the same time however lengths differ. Neither
their number nor the sizes of these arrays depends on lengths: a CUDA graph is captured once, and replayed with other
contents.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

TILE = 128
"""Keys of a tile: the least that is worth a program (FlashInfer's least chunk), and a multiple of every BLOCK_N."""


class WorkList(NamedTuple):
    """The work of all programs, in order.

    An item is a run of tiles of one sequence. A sequence with several items is split: each item leaves a partial result
    in a slot, and the program that finishes last merges them.
    """

    first_items: torch.Tensor
    """int32 [programs + 1]: program p has the items first_items[p] to first_items[p + 1]."""
    items: torch.Tensor
    """int32 [sequences + programs, 4]: sequence, first tile, tiles, slot; the rest is unused."""
    first_slots: torch.Tensor
    """int32 [sequences + 1]: sequence i has the slots first_slots[i] to first_slots[i + 1], none if it isn't split."""
    arrived: torch.Tensor
    """int32 [sequences, kv_heads] zeros: number of programs that have left their partial result.

    The program that merges sets it to zero again, for the next layer.
    """


def most_slots(programs: int) -> int:
    """Return the largest number of slots: each program's share may begin and end in a split sequence."""
    return 2 * programs


def deal(
    seq_lens: NDArray[np.int32], programs: int, kv_heads: int, window: int | None = None
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Return the arrays of a `WorkList` for sequences of `seq_lens` tokens, int [sequences]; 0: nothing is computed.

    Only the last `window` tokens are seen. There are `programs` programs for each of `kv_heads` KV heads.
    """
    sequences = len(seq_lens)
    first_tiles = np.zeros(sequences, dtype=np.int64) if window is None else np.maximum(seq_lens - window, 0) // TILE
    ends = np.cumsum(-(-seq_lens // TILE) - first_tiles)  # on the line of tiles
    begins, total = np.concatenate(([0], ends[:-1])), int(ends[-1])
    share = max(1, -(-total // programs))
    item_begins = np.union1d(begins[begins < total], np.arange(0, total, share))
    count = len(item_begins)
    sequence = np.searchsorted(ends, item_begins, side="right")
    parts = np.bincount(sequence, minlength=sequences)
    split = parts[sequence] > 1

    items = np.zeros((sequences + programs, 4), dtype=np.int32)
    items[:count, 0] = sequence
    items[:count, 1] = item_begins - begins[sequence] + first_tiles[sequence]
    items[:count, 2] = np.diff(item_begins, append=total)
    items[:count, 3] = np.where(split, np.cumsum(split) - 1, -1)
    first_items = np.searchsorted(item_begins, share * np.arange(programs + 1)).astype(np.int32)
    first_slots = np.concatenate(([0], np.cumsum(np.where(parts > 1, parts, 0)))).astype(np.int32)
    return first_items, items, first_slots, np.zeros((sequences, kv_heads), dtype=np.int32)


def balance(first_items: NDArray[np.int32], items: NDArray[np.int32]) -> float:
    """Return the largest number of tiles of a program relative to the mean: 1 if all programs have the same."""
    done = np.concatenate(([0], np.cumsum(items[: first_items[-1], 2])))[first_items]
    return float(np.diff(done).max() * (len(first_items) - 1) / done[-1])
