"""Iterations over merged blocks: the results are those over the model's own blocks, and the profile keeps the ratio."""

import itertools
from dataclasses import replace

import pytest
import torch

from exegpt.kernels.kv_layout import keys_like_values
from tests.xcore.small_specs import profile
from tests.xprofiler.test_rates import SPEC
from xcore.errors import InputError
from xprofiler import merged_cache
from xrunner.models import random_model
from xrunner.models.create import create_model


def test_the_shortest_iterations_of_each_kind_count(monkeypatch):
    seconds = {False: itertools.cycle([9.0, 2.0, 5.0]), True: itertools.cycle([9.0, 8.0, 3.0])}
    monkeypatch.setattr(merged_cache, "decoding", lambda model, merged: merged)
    monkeypatch.setattr(merged_cache, "cpu_clock", lambda merged: seconds[merged].__next__)
    assert merged_cache.merged_ratio(None).seconds == 1.5


def test_an_iteration_over_merged_blocks_computes_the_same(tmp_path):
    spec = create_model(
        tmp_path / "model", "llama", layers=2, hidden=32, heads=2, kv_heads=1, ffn=64, vocab=300, context=48
    )
    model, outputs = random_model(spec, 2, "fp32"), []
    for merged in (False, True):
        torch.manual_seed(3)  # the same order of blocks
        batch, cache = merged_cache.batch_and_cache(model, merged)
        blocks, draws = batch.attention[0].tables.flatten().long(), torch.Generator().manual_seed(5)
        assert len({*blocks.tolist()}) == len(blocks)
        order = blocks[blocks.argsort()]
        for tensor in (*map(keys_like_values, cache.keys), *cache.values):
            tensor[order] = torch.randn(tensor[order].shape, generator=draws)
        outputs.append(model.forward(batch, cache))
    assert outputs[0].isfinite().all() and torch.equal(*outputs)


def test_a_profile_keeps_the_factor_and_refuses_an_impossible_one():
    plain = profile(SPEC)
    assert plain.merged_blocks is None and replace(plain, merged_blocks=1.25).fingerprint != plain.fingerprint
    for factor in (0.5, 1000.0, float("nan")):
        with pytest.raises(InputError, match="a factor of"):
            replace(plain, merged_blocks=factor)
