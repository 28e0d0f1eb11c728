"""How attention on a GPU is cut: tiles that hold whole tokens and fit, splits by FlashAttention's rule."""

import math

from hypothesis import given
from hypothesis import strategies as st

from exegpt.kernels.attention_tiles import TILES, choose_tile, family, num_splits, shared_bytes
from exegpt.kernels.gpu_device import Architecture
from exegpt.kernels.work_list import TILE

SMALL_GPU = Architecture(86, 84, 99 * 1024)
GPUS = (SMALL_GPU, Architecture(80, 108, 163 * 1024), Architecture(90, 132, 227 * 1024))


@given(
    st.sampled_from(GPUS),
    st.sampled_from(["prefill", "decode"]),
    st.integers(1, 4096),
    st.integers(1, 71),
    st.integers(1, 256),
    st.sampled_from([2, 4]),
    st.booleans(),
)
def test_tiles_hold_whole_tokens_and_fit(gpu, phase, tokens, group, head_size, itemsize, biased):
    tile = choose_tile(gpu, phase, 1 if phase == "decode" else tokens, group, head_size, itemsize, biased)
    assert tile.block_m >= max(16, group) and tile.block_m & (tile.block_m - 1) == 0
    assert tile.block_n >= 16 and TILE % tile.block_n == 0  # which a work list's tiles are cut into
    assert tile.num_warps in (4, 8) and tile.num_stages >= 2 and tile.resident >= 1
    if group <= 16:
        assert shared_bytes(gpu.capability, tile, head_size, itemsize) <= gpu.shared_bytes


def test_every_architecture_has_every_row():
    assert {family(cc) for cc in (80, 86, 89, 90, 100, 103, 120, 75)} == {80, 86, 90, 100}
    assert set(TILES) == {(a, s, p) for a in (80, 86, 90, 100) for s in (64, 128, 256) for p in ("prefill", "decode")}


def test_splits_of_flash_attentions_own_example():
    """48 programs on 108 multiprocessors: two splits fill 0.89 of a wave, three 0.67 of two."""
    assert num_splits(48, 108, 1000) == 2


@given(st.integers(1, 600), st.integers(1, 600), st.integers(1, 300))
def test_splits_follow_the_rule(programs, slots, most_tiles):
    splits = num_splits(programs, slots, most_tiles)
    assert 1 <= splits <= max(1, min(slots, most_tiles, 128))
    if programs >= 0.8 * slots:
        assert splits == 1
        return

    def fullness(n):
        return programs * n / slots / math.ceil(programs * n / slots)

    tried = range(1, min(slots, most_tiles, 128) + 1)
    useful = [n for n in tried if n == 1 or math.ceil(most_tiles / n) < math.ceil(most_tiles / (n - 1))]
    best = max(map(fullness, useful))
    assert splits in useful and fullness(splits) >= 0.85 * best
    assert all(fullness(n) < 0.85 * best for n in useful if n < splits)
