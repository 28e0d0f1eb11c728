"""What is counted as a launch, and how many a layer has."""

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.launches import META, _Operators, launches
from xcore.specs.model import ModelSpec


def sizes(architecture, **more):
    config = {"heads": 4, "kv_heads": 2 if architecture in ("llama", "qwen2", "qwen3") else 4, "head_size": 16}
    config |= {"gated": architecture in ("llama", "qwen2", "qwen3"), "vocab": 300, "context": 96}
    return ModelSpec("m", architecture, 1, 64, ffn=96, **config, **more)


@pytest.mark.parametrize(
    ("architecture", "most", "more"),
    [
        ("llama", 9, {}),
        ("qwen2", 9, {}),
        ("qwen3", 11, {}),
        ("gpt2", 10, {}),
        ("opt", 10, {}),
        ("t5", 13, {"encoder_layers": 1}),
    ],
)
def test_a_decoding_layer_launches_no_more(architecture, most, more):
    names = launches(sizes(architecture, **more), 3, 40)
    assert len(names) == most, names
    assert names.count("_norm") >= 2 and "copy" not in names


def test_what_launches_is_counted():
    x, y, names = torch.empty(4, 4, device=META), torch.empty(4, 4, device=META), []
    with torch.inference_mode(), _Operators(names):
        x[1:].t().view(4, 3)  # views
        torch.empty_like(x)
        x[4:].zero_()
        x[4:] = 0  # for the zero alone
        torch.addmm(x, y, y)  # the addend is copied first
        x.addmm_(y, y)
        x + y
    assert names == ["scalar_tensor", "copy", "addmm", "addmm_", "add"]
