"""Before a timed call as much is read as a run reads between two visits of that part."""

from types import SimpleNamespace

import pytest

from xprofiler import reuse
from xprofiler.reuse import Reuse
from xrunner.models import load_model
from xrunner.models.create import create_model

HIDDEN, FFN, VOCAB, LAYERS = 32, 64, 300, 3
LAYER = (2 + 2 / 2) * HIDDEN**2 + 3 * HIDDEN * FFN + 2 * HIDDEN
"""Queries and output, keys and values of one head of two, the gated FFN, two norms."""


@pytest.fixture
def reads(tmp_path):
    """What is read before each part of a tiny model, and the model."""
    create_model(
        tmp_path / "m", "llama", layers=LAYERS, hidden=HIDDEN, heads=2, kv_heads=1, ffn=FFN, vocab=VOCAB, context=48
    )
    model = load_model(tmp_path / "m")
    return Reuse(model), model


def read(before):
    """How many floats."""
    return int(before())  # a sum of ones


def test_layers_wait_for_the_head_and_the_sequences_caches(reads):
    before, _ = reads
    cached = 256 * LAYERS * 2 * 16  # keys and values of one KV head of 16
    assert read(before.layers(1)) == VOCAB * HIDDEN + cached
    assert read(before.layers(5)) == VOCAB * HIDDEN + 5 * cached


def test_the_head_waits_for_the_layers_and_attention_for_both(reads):
    before, _ = reads
    assert read(before.ends(0)) == LAYERS * LAYER
    assert read(before.attention()) == LAYERS * LAYER + VOCAB * HIDDEN


def test_no_more_is_read_than_changes_anything(reads):
    before, _ = reads
    most = reuse._MOST_BYTES // 4
    assert before._memory is not None and len(before._memory) == most
    assert read(before.layers(10**6)) == pytest.approx(most, rel=1e-6)


def test_a_gpu_reads_nothing(reads):
    _, model = reads
    gpu = SimpleNamespace(type="cuda")
    there = SimpleNamespace(spec=model.spec, shard=model.shard, dtype="fp32", kv_dtype="fp32", device=gpu)
    assert Reuse(there).layers(1)() is None
