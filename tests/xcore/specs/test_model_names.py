"""The many names of one model, and the reasons why some can't be planned."""

import re

import pytest

from xcore.errors import InputError
from xcore.specs.builtin_models import HUB_IDS, builtin_config, builtin_model, stands_for


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("meta-llama/Llama-2-13b-chat-hf", "llama-2-13b"),
        ("meta-llama/Llama-3.3-70B", "llama-3.3-70b"),
        ("unsloth/Llama-3.2-1B-Instruct", "llama-3.2-1b"),
        ("llama3.1:8b", "llama-3.1-8b"),
        ("mistralai/Mistral-7B-Instruct-v0.1", "mistral-7b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "llama-3.1-8b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", "llama-3.3-70b"),
        ("nvidia/Llama-3.1-Nemotron-70B-Instruct-HF", "llama-3.1-70b"),
        ("Qwen/Qwen3-32B", "qwen3-32b"),
        ("Qwen/Qwen2.5-3B-Instruct", "qwen2.5-3b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
        ("deepseek-ai/DeepSeek-V3.1", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek-v3"),
        ("zai-org/GLM-4.5-Air", "glm-4.5-air"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama-4-scout"),
        ("meta-llama/Llama-4-Maverick-17B-128E-Instruct", "llama-4-maverick"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("microsoft/phi-4", "phi-4"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "mistral-small-3"),
        ("zai-org/GLM-5.1", "glm-5"),
    ],
)
def test_suffixes_owners_and_derivatives_resolve(name, builtin):
    spec = builtin_model(name)
    assert spec.fingerprint == builtin_model(builtin).fingerprint
    assert stands_for(name) == (None if name in HUB_IDS.values() else builtin)
    assert spec.name == (builtin if name in HUB_IDS.values() else name)


@pytest.mark.parametrize("name", HUB_IDS)
def test_every_builtin_has_its_instruct_and_chat_names(name):
    for suffix in ("-Instruct", "-chat", "-it", "-hf"):
        assert stands_for(f"{HUB_IDS[name] or name}{suffix}") == name


@pytest.mark.parametrize(
    ("name", "builtin", "context"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b", 32768),  # without YaRN
        ("Qwen/Qwen2.5-72B-Instruct", "qwen2.5-72b", 32768),
        ("Qwen/Qwen2-7B", "qwen2.5-7b", 131072),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b", 262144),
        ("Qwen/QwQ-32B", "qwen2.5-32b", 40960),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", "qwen2.5-32b", 131072),
        ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", "qwen3-8b", 131072),
    ],
)
def test_a_context_of_its_own_is_kept(name, builtin, context):
    spec, base = builtin_model(name), builtin_model(builtin)
    assert spec.context == context and spec.parameters == base.parameters
    assert builtin_config(name) == builtin_config(builtin) | {"max_position_embeddings": context}


def test_derivatives_differ_where_their_configs_do():
    assert builtin_model("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B").parameters == pytest.approx(1.777e9, rel=1e-3)
    assert builtin_model("Qwen/Qwen2.5-1.5B-Instruct").parameters == pytest.approx(1.544e9, rel=1e-3)
    windows = {version: builtin_model(f"mistralai/Mistral-7B-Instruct-v0.{version}").window for version in (1, 2, 3)}
    assert windows == {1: 4096, 2: None, 3: None}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("baidu/ERNIE-4.5-21B-A3B-PT", "mixture of experts whose sizes are not built in"),
        ("deepseek-ai/DeepSeek-V2-Lite", "mixture of experts whose sizes"),
        ("deepseek-ai/DeepSeek-V4-Pro", "compresses keys and values"),
        ("Qwen/Qwen3.5-27B", "linear-attention"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B", "state-space"),
        ("google/gemma-4-31b-it", "other heads"),
        ("google/gemma-3n-E4B-it", "sliding window"),
        ("microsoft/phi-3-mini-4k-instruct", "pass a directory with its config.json"),
        ("nvidia/Llama-3_3-Nemotron-Super-49B-v1", "unequal sizes"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "vision"),
        ("gpt-4o", "closed"),
    ],
)
def test_what_is_not_supported_is_called_that(name, reason):
    with pytest.raises(InputError, match=f"^'{re.escape(name)}' is not supported: .*{reason}") as refused:
        builtin_model(name)
    assert "nearest" not in str(refused.value)


def test_only_names_that_are_really_close_are_offered():
    with pytest.raises(InputError, match=r"'llama-3\.1-9b': the nearest are llama-3\.1-8b"):
        builtin_model("llama-3.1-9b")
    for name in ("acme/Rocket-7B", "01-ai/Yi-34B", "chinchilla"):
        with pytest.raises(InputError, match="`exegpt list models`") as refused:
            builtin_model(name)
        assert "nearest" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama-3.1-8b", "bf16"), ("Qwen/Qwen2.5-7B-Instruct", "bf16"), ("llama-2-7b", "fp16"), ("opt-13b", "fp16")],
)
def test_a_name_has_the_checkpoints_dtype_and_no_size(name, dtype):
    from dataclasses import replace

    spec = builtin_model(name)
    assert spec.dtype == dtype
    assert replace(spec, dtype=None).fingerprint == spec.fingerprint
