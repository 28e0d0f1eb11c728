"""Sizes of the published configs of today's models, and what their quantised checkpoints have."""

import csv
import importlib.util
import json
from pathlib import Path

import pytest

from tests.public_data import needs_data
from xcore.errors import InputError
from xcore.specs.builtin_models import builtin_model
from xcore.specs.model import ModelSpec

_PACKAGE = importlib.util.find_spec("aiconfigurator_core")
CONFIGS = Path(_PACKAGE.submodule_search_locations[0]) / "model_configs" if _PACKAGE else Path("missing")


def published(name: str) -> ModelSpec:
    if not CONFIGS.is_dir():
        pytest.skip("aiconfigurator-core is not installed: its model_configs are missing")
    return ModelSpec.from_config(json.loads((CONFIGS / f"{name}_config.json").read_text()), name)


@pytest.mark.parametrize(
    ("config", "name", "dtype"),
    [
        ("Qwen--Qwen3-235B-A22B-FP8", "Qwen/Qwen3-235B-A22B-FP8", "fp8"),
        ("Qwen--Qwen3-30B-A3B", "qwen3-30b-a3b", "bf16"),
        ("Qwen--Qwen3-Coder-480B-A35B-Instruct", "qwen3-coder-480b-a35b", "bf16"),
        ("deepseek-ai--DeepSeek-R1", "deepseek-ai/DeepSeek-R1", "fp8"),
        ("moonshotai--Kimi-K2-Instruct", "moonshotai/Kimi-K2-Instruct", "fp8"),
        ("moonshotai--Kimi-K2.5", "kimi-k2.5", "int4"),
        ("nvidia--Kimi-K2.6-NVFP4", None, "nvfp4"),
        ("meta-llama--Llama-4-Maverick-17B-128E-Instruct", "llama-4-maverick", "bf16"),
        ("meta-llama--Llama-4-Scout-17B-16E-Instruct", "llama-4-scout", "bf16"),
        ("MiniMaxAI--MiniMax-M2.5", "minimax-m2.5", "fp8"),
        ("nvidia--MiniMax-M2.5-NVFP4", "nvidia/MiniMax-M2.5-NVFP4", "nvfp4"),
        ("mistralai--Mixtral-8x22B-v0.1", "mixtral-8x22b", "bf16"),
        ("openai--gpt-oss-120b", "gpt-oss-120b", "mxfp4"),
        ("openai--gpt-oss-20b", "openai/gpt-oss-20b", "mxfp4"),
        ("zai-org--GLM-5-FP8", "zai-org/GLM-5-FP8", "fp8"),
        ("Qwen--Qwen3-32B-FP8", "Qwen/Qwen3-32B-FP8", "fp8"),
        ("meta-llama--Meta-Llama-3.1-405B", "llama-3.1-405b", "bf16"),
    ],
)
def test_a_config_and_a_name_give_the_same_sizes(config, name, dtype):
    spec = published(config)
    assert spec.dtype == dtype
    if name:
        named = builtin_model(name)
        assert named.dtype == dtype and named.fingerprint == spec.fingerprint


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("Qwen--Qwen3.5-27B", "qwen3_5"),
        ("google--gemma-4-26B-A4B", "gemma4"),
        ("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nemotron_h"),
        ("XiaomiMiMo--MiMo-V2-Flash", "mimo_v2_flash"),
        ("moonshotai--Kimi-K3", "kimi_k3"),
    ],
)
def test_an_architecture_without_known_costs_is_named(config, said):
    with pytest.raises(InputError, match=f"of type '{said}', which is not supported"):
        published(config)


def _rows(known: bool) -> list[dict[str, str]]:
    with needs_data("models.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if bool(row["total_parameters"]) == known]


def test_every_model_of_today_has_the_published_number_of_parameters():
    for row in _rows(known=True):
        for name in row["name"].replace(" (24B)", "").split(" / "):
            spec = builtin_model({"R1": "DeepSeek-R1"}.get(name, name))
            assert spec.parameters == pytest.approx(float(row["total_parameters"]), rel=0.01), name
            outside = 2 if spec.architecture == "gpt_oss" else 1  # gpt-oss: published without embeddings
            active = spec.active_parameters - (outside - 1) * spec.vocab * spec.hidden
            assert active == pytest.approx(float(row["active_parameters"]), rel=0.02), name
            assert spec.context == int(row["context"]), name


def test_models_whose_cost_is_not_known_are_refused_with_the_reason():
    for row in _rows(known=False):
        with pytest.raises(InputError, match="is not supported: "):
            builtin_model(row["name"])
