"""Attention by FlashInfer as the profiler times it, by the stand-in."""

import itertools

import pytest
import torch

from exegpt.kernels.attention import attention_reference
from xcore.specs.model import ModelSpec
from xprofiler import attention_probe
from xprofiler.attention_probe import AttentionProbe

from ..kernels import flashinfer_stand_in

MODEL = ModelSpec("m", "llama", 2, 64, 4, 2, 16, 48, True, 300, 256)


@pytest.mark.parametrize(("batch", "new", "past"), [(3, 1, 39), (2, 20, 0), (1, 7, 30)])
def test_one_plan_is_for_all_parts_of_the_pool(monkeypatch, batch, new, past):
    """Each call reads other blocks, with which the reference agrees."""
    monkeypatch.setattr(attention_probe, "COLD_BYTES", 2**18)
    with flashinfer_stand_in.in_its_place() as calls:
        probe = AttentionProbe(MODEL, 3, 40, attention="flashinfer")
        probe._keys.normal_(), probe._values.normal_()
        seen, real = [], attention_probe.attention
        monkeypatch.setattr(
            attention_probe, "attention", lambda *args, work: seen.append(args) or real(*args, work=work)
        )
        call = probe.call(batch, new, past)
        blocks = batch * -(-(past + new) // 16)
        for first in itertools.islice(
            itertools.cycle(range(0, min(MODEL.layers, probe._blocks // blocks) * blocks, blocks)), 5
        ):
            got = call()
            q, _, _, table, offsets, contexts, _ = seen[-1]
            expected = attention_reference(q, probe._keys, probe._values, table + first, offsets, contexts)
            torch.testing.assert_close(got, expected)
        assert [method for _, method, _, _ in calls] == ["__init__", "plan", *["run"] * 5]
        graphs = "paged_kv_indptr_buffer" in calls[0][3]
        assert graphs == (new == 1)  # as an engine decodes
