"""The tiles of attention on a GPU, and the splits of its keys if there are too few programs."""

import functools
import math
from dataclasses import dataclass, replace

from exegpt.kernels.gpu_device import Architecture


@dataclass(frozen=True)
class Tile:
    """What one program computes at a time."""

    block_m: int
    """Rows: tokens of a sequence times the query heads of a KV head, then padding rows."""
    block_n: int
    """Columns: keys."""
    num_warps: int
    num_stages: int
    """Triton's stages: K and V are read `num_stages` - 1 tiles ahead."""
    resident: int
    """Number of programs that a multiprocessor runs at a time."""


TILES: dict[tuple[int, int, str], Tile] = {
    (80, 64, "prefill"): Tile(64, 64, 4, 3, 2),  # 188 registers, 40 KiB
    (80, 128, "prefill"): Tile(64, 32, 4, 3, 2),  # 233 registers, 52 KiB; with 64 keys 254, 88 KiB: one at a time
    (80, 256, "prefill"): Tile(64, 32, 8, 3, 1),  # 225 registers, 100 KiB; with 4 warps 136 bytes spill
    (80, 64, "decode"): Tile(16, 64, 4, 3, 4),  # 96 registers, 36 KiB
    (80, 128, "decode"): Tile(16, 64, 4, 3, 2),  # 168 registers, 70 KiB
    (80, 256, "decode"): Tile(16, 32, 4, 3, 2),  # 168 registers, 73 KiB
    (86, 64, "prefill"): Tile(64, 64, 4, 3, 2),  # 188 registers, 40 KiB
    (86, 128, "prefill"): Tile(128, 32, 8, 3, 1),  # 187 registers, 64 KiB; 64 rows of 4 warps are alone, too
    (86, 256, "prefill"): Tile(64, 16, 8, 3, 1),  # 173 registers, 66 KiB
    (86, 64, "decode"): Tile(16, 64, 4, 3, 2),  # 116 registers, 36 KiB
    (86, 128, "decode"): Tile(16, 32, 4, 3, 2),  # 128 registers, 37 KiB
    (86, 256, "decode"): Tile(16, 16, 4, 3, 2),  # 128 registers, 41 KiB
    (90, 64, "prefill"): Tile(64, 64, 4, 3, 3),  # 168 registers, 56 KiB
    (90, 128, "prefill"): Tile(64, 64, 4, 3, 2),  # 234 registers, 112 KiB; 128 rows of 8 warps: 206, one at a time
    (90, 256, "prefill"): Tile(64, 32, 8, 3, 1),  # 170 registers, 128 KiB
    (90, 64, "decode"): Tile(16, 128, 4, 3, 3),  # 160 registers, 70 KiB
    (90, 128, "decode"): Tile(16, 64, 4, 3, 2),  # 168 registers, 70 KiB; three fit, two were faster
    (90, 256, "decode"): Tile(16, 32, 4, 3, 2),  # 204 registers, 73 KiB
    (100, 64, "prefill"): Tile(64, 64, 4, 3, 3),  # 165 registers, 57 KiB
    (100, 128, "prefill"): Tile(64, 64, 4, 3, 2),  # 218 registers, 113 KiB
    (100, 256, "prefill"): Tile(64, 32, 8, 3, 1),  # 147 registers, 129 KiB
    (100, 64, "decode"): Tile(16, 128, 4, 3, 3),  # 163 registers, 70 KiB
    (100, 128, "decode"): Tile(16, 64, 4, 3, 3),  # 128 registers, 70 KiB; with 128 keys 12 bytes spill
    (100, 256, "decode"): Tile(16, 32, 4, 3, 2),  # 206 registers, 73 KiB
}
"""Tiles for 16-bit elements, by (architecture, columns of a head at most, phase).

Of the tiles tried, these spill nothing, read ahead, and fit most often on a multiprocessor; then those with more keys.
The comments say the registers and the shared memory to which Triton 3.7 compiles them. Only those of (90, 128) and (90,
64, "prefill") have been timed against others (docs/log/kernels.md).
"""

_FLOAT32 = {64: Tile(32, 32, 4, 3, 2), 256: Tile(16, 16, 4, 3, 2)}
"""Tiles for 32-bit elements, which no matrix unit multiplies: both tiles are in registers."""


def family(capability: int) -> int:
    """Return the architecture whose rows of `TILES` a compute capability takes.

    86 stands for all with 99 KiB of shared memory per program (86, 89, 120), and for unknown ones.
    """
    return capability // 10 * 10 if capability in (80, 87, 90, 100, 103) else 86


def head_dim(head_size: int) -> int:
    """Return the columns of a tile for a head: a power of two, and no fewer than matrix units take."""
    return max(16, _next_power_of_2(head_size))


def shared_bytes(capability: int, tile: Tile, head_size: int, itemsize: int) -> int:
    """Return the shared memory that Triton gives a program, at most 2 KiB too much.

    The memory holds Q, the buffers of K and V, and attention weights if warps that share rows exchange them. Matrix
    units that read shared memory themselves (from compute capability 9.0 on, for at least 64 rows) have one more
    buffer, and take the weights from registers.
    """
    width = head_dim(head_size)
    by_themselves = capability in (90, 100, 103) and tile.block_m >= 64 and itemsize == 2
    buffers = tile.num_stages if by_themselves else tile.num_stages - 1
    weights = 0 if by_themselves or tile.block_m >= max(width, tile.block_n) else tile.block_m * tile.block_n
    barriers = 2048 if by_themselves and capability >= 100 else 0
    return ((tile.block_m + 2 * buffers * tile.block_n) * width + weights) * itemsize + barriers


def choose_tile(
    gpu: Architecture, phase: str, tokens: int, group: int, head_size: int, itemsize: int, biased: bool
) -> Tile:
    """Return the tile for sequences of about `tokens` new tokens and `group` query heads per KV head.

    Elements have `itemsize` bytes. `biased`: whether there is a position bias.
    """
    width = head_dim(head_size)
    if itemsize == 4:
        tile = _FLOAT32[64 if width <= 64 else 256]
    else:
        row = "prefill" if group > 16 else phase  # as many rows, even for one token
        tile = TILES[family(gpu.capability), min(size for size in (64, 128, 256) if width <= size), row]
    if biased or (phase == "decode" and group > 16):  # addresses of the bias, or masks, take registers, too
        tile = replace(tile, block_n=max(16, tile.block_n // 2))
    block_m = max(16, _next_power_of_2(group), min(tile.block_m, _next_power_of_2(group * tokens)))
    if block_m > tile.block_m:
        tile = replace(tile, num_warps=8, resident=1)
    tile = replace(tile, block_m=block_m)
    while tile.num_stages > 2 and shared_bytes(gpu.capability, tile, head_size, itemsize) > gpu.shared_bytes:
        tile = replace(tile, num_stages=tile.num_stages - 1)
    return tile


@functools.lru_cache(maxsize=1024)
def num_splits(programs: int, slots: int, most_tiles: int) -> int:
    """Return how many programs share the keys of each of `programs` tiles of rows.

    The device runs `slots` programs at a time, and there are up to `most_tiles` tiles of keys. This is FlashAttention's
    rule (`num_splits_heuristic` in flash_api.cpp): 1 if the programs fill 0.8 of the slots. Otherwise it considers the
    numbers that reduce the largest share, and takes the smallest whose waves are at least 85 % as full as the fullest.
    """
    if programs >= 0.8 * slots:
        return 1

    def share(splits: int) -> int:
        return -(-most_tiles // splits)

    fullness = {}
    for splits in range(1, min(128, slots, most_tiles) + 1):
        if splits == 1 or share(splits) != share(splits - 1):
            waves = programs * splits / slots
            fullness[splits] = waves / math.ceil(waves)
    return min(splits for splits, full in fullness.items() if full >= 0.85 * max(fullness.values()))


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
