"""Merged and split blocks hold what a model's own blocks hold, and the kernel reads the same from all of them."""

from dataclasses import replace

import pytest
import torch

from benchmarks import merged_blocks
from benchmarks.merged_blocks import Load
from xcore.specs.builtin_models import builtin_model

SMALL = replace(builtin_model("llama-2-7b"), layers=2, hidden=64, heads=4, kv_heads=2, head_size=16)
LARGER = replace(SMALL, layers=3, hidden=96, heads=6, kv_heads=3)
PAIRS = [(SMALL, SMALL), (SMALL, LARGER), (LARGER, SMALL)]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("pair", PAIRS)
def test_attention_is_the_same_over_all_layouts(pair, dtype):
    row = merged_blocks.measure(pair, 3, 37, dtype, 1)  # ends if an output differs from plain PyTorch
    assert len(row) == 7 and row[2].endswith("%")


def test_a_wrong_block_is_noticed(monkeypatch):
    fill = merged_blocks.fill

    def swapped(layouts, load, contents):
        fill(layouts, load, contents[::-1] if layouts[0].values.shape[1] == 1 else contents)

    monkeypatch.setattr(merged_blocks, "fill", swapped)
    with pytest.raises(SystemExit, match="split blocks differ from plain PyTorch"):
        merged_blocks.measure(PAIRS[1], 2, 37, "fp32", 1)


@pytest.mark.parametrize("pair", PAIRS)
def test_no_two_blocks_lie_in_one_place(pair):
    load = Load(pair[0], 3, 37, "fp32")
    for layouts in (
        merged_blocks.own_blocks(load),
        merged_blocks.merged_blocks(load, pair[1]),
        merged_blocks.split_blocks(load, pair[1], False),
        merged_blocks.split_blocks(load, pair[1], True),
    ):
        assert len(layouts) == pair[0].layers
        for number, layout in enumerate(layouts):
            for cache in (layout.keys, layout.values):
                cache[layout.tables.flatten().long()] = float(number + 1)
        held = [cache[layout.tables.flatten().long()] for layout in layouts for cache in (layout.keys, layout.values)]
        for number, content in enumerate(held):
            assert torch.equal(content, torch.full_like(content, number // 2 + 1))
        assert all(len({*layout.tables.flatten().tolist()}) == layout.tables.numel() for layout in layouts)
