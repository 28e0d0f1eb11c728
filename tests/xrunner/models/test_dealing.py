"""What a model's work lists depend on, and how a batch comes to have them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from exegpt.kernels import gpu_device
from exegpt.kernels.gpu_device import H100
from xrunner.models import Dealing
from xrunner.models.batch import AttentionArrays
from xrunner.models.cache import KVCache
from xrunner.rank.assembly import DeviceBatch


def a_model(*windows, kv_heads=2, encoder_layers=0):
    """What a dealing asks a model for, and a cache for it."""
    spec = SimpleNamespace(encoder_layers=encoder_layers, heads=4 * kv_heads, kv_heads=kv_heads)
    layers = [SimpleNamespace(window=window) for window in windows]
    values = torch.zeros(3, kv_heads, 16, 128, dtype=torch.bfloat16)
    return SimpleNamespace(spec=spec, share=spec, layers=layers, attention="triton"), KVCache((values,), (values,))


def test_the_cpu_takes_no_work_list():
    assert Dealing.of(*a_model(None)) is None


@pytest.mark.parametrize(("windows", "window"), [((None, None), None), ((7, 7), 7), ((7, None), None)])
def test_programs_fill_the_device_and_lists_have_the_layers_window(monkeypatch, windows, window):
    monkeypatch.setattr(gpu_device, "on_gpu", lambda x: True)
    for kv_heads in (1, 2, 8):
        dealing = Dealing.of(*a_model(*windows, kv_heads=kv_heads))
        assert (dealing.kv_heads, dealing.window) == (kv_heads, window)
        at_once = dealing.programs * kv_heads / H100.multiprocessors
        assert at_once >= 1 and at_once == pytest.approx(round(at_once), abs=0.1)
    assert Dealing.of(*a_model(*windows, encoder_layers=2)) is None


def device_batch(*parts):
    """DeviceBatch whose parts of the attention have sequences of these (new tokens, context)."""
    attention, begin = [], 0
    for sizes in parts:
        news, contexts = zip(*sizes, strict=True)
        tables = np.arange(9 * len(sizes), dtype=np.int32).reshape(len(sizes), 9)
        offsets = np.cumsum([0, *news], dtype=np.int32)
        contexts = np.array(contexts, dtype=np.int32)
        attention.append(AttentionArrays(begin, begin + sum(news), tables, offsets, contexts))
        begin += sum(news)
    tokens = np.arange(begin)
    return DeviceBatch("decode", 0, 1, begin, tokens, tokens + 1, tokens + 2, tuple(attention), tokens, begin)


DEALING = Dealing(programs=5, kv_heads=2, window=None)


def test_parts_with_one_token_each_get_a_list():
    plain = device_batch(((3, 40), (1, 9)), ((1, 700), (1, 20)))
    assert plain.with_work_lists(None) is plain and plain.to_device().attention[1].work is None
    dealt = plain.with_work_lists(DEALING)
    (prompts, decoding), batch = dealt.to_device().attention, dealt.to_device()
    assert prompts.work is None
    for mine, expected in zip(decoding.work, DEALING.deal(plain.attention[1].contexts), strict=True):
        assert np.array_equal(mine.numpy(), expected)
    for name in ("tokens", "positions", "slots", "rows"):
        assert np.array_equal(getattr(batch, name).numpy(), getattr(plain, name))
    assert np.array_equal(decoding.contexts.numpy(), [700, 20])


def test_a_graphs_buffers_hold_any_list():
    batches = [device_batch([(1, context) for context in contexts]) for contexts in ((1, 1, 5), (140, 9, 130))]
    padded = [batch.padded(4, 99, 16).with_work_lists(DEALING) for batch in batches]
    sizes = [[a.shape for i, a in enumerate(b.forward_arrays) if i not in b.table_places] for b in padded]
    assert sizes[0] == sizes[1]
