"""Sizes that a config.json leaves out: transformers is the oracle."""

import pytest

from xcore.errors import InputError
from xcore.specs.model import ModelSpec

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "vocab_size": 270_000,
    "max_position_embeddings": 4096,
}
EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
}
DENSE = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text")
SPARSE = ("mixtral", "minimax_m2", "qwen3_moe", "glm4_moe", "gpt_oss", "llama4_text")


def transformers_sizes(config):
    from transformers import CONFIG_MAPPING

    read = CONFIG_MAPPING[config["model_type"]](**{key: value for key, value in config.items() if key != "model_type"})
    heads = read.num_attention_heads
    kv_heads = read.num_key_value_heads or heads
    head_size = getattr(read, "head_dim", None) or read.hidden_size // heads
    return read.num_hidden_layers, heads, kv_heads, head_size, read.vocab_size, read.max_position_embeddings


@pytest.mark.parametrize("lacking", [None, *SIZES])
@pytest.mark.parametrize("kind", [*DENSE, *SPARSE])
def test_a_key_that_is_missing_has_transformers_default_or_is_asked_for(kind, lacking):
    pytest.importorskip("transformers")
    whole = {"model_type": kind, **SIZES, **(EXPERTS if kind in SPARSE else {})}
    config = {key: value for key, value in whole.items() if key != lacking}
    try:
        spec = ModelSpec.from_config(config, "m")
    except InputError as error:
        assert f"lacks the key '{lacking}'" in str(error) and lacking not in ("num_key_value_heads", "head_dim")
        return
    sizes = spec.layers, spec.heads, spec.kv_heads, spec.head_size, spec.vocab, spec.context
    assert sizes == transformers_sizes(config)


def test_a_gemma_3_without_heads_vocabulary_and_context_has_the_parameters_of_transformers():
    """The config.json of gemma-3-4b-it has only these keys."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    spec = ModelSpec.from_config({"model_type": "gemma3", "text_config": text}, "gemma-3-4b-it")
    with torch.device("meta"):
        model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**text))
    assert spec.parameters == model.num_parameters() == 3_880_263_168


@pytest.mark.parametrize("kv_heads", [5, 64])
def test_kv_heads_that_do_not_divide_the_heads_are_refused(kv_heads):
    config = {"model_type": "llama", **SIZES, "num_attention_heads": 32, "num_key_value_heads": kv_heads}
    with pytest.raises(InputError, match=f"32 heads, which {kv_heads} KV heads do not divide: correct one"):
        ModelSpec.from_config(config, "m")
