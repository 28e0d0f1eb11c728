"""What follows from a model's sizes, where no built-in one shows it."""

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xcore.errors import InputError
from xcore.specs.builtin_models import builtin_config, builtin_model
from xcore.specs.model import ModelSpec

SPEC = builtin_model("llama-3.1-8b")


@given(st.integers(0, 40), st.integers(0, 40), st.none() | st.integers(1, 50))
def test_attended_tokens_match_a_count_per_token(new, past, window):
    seen = sum(min(past + i, window or past + i) for i in range(1, new + 1))
    assert replace(SPEC, window=window).seen(new, past) == seen


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({"model_type": "mistral"}, 4096),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "qwen2", "sliding_window": 512}, None),
        ({"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": True, "max_window_layers": 0}, 512),
        ({"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": True, "max_window_layers": 2}, None),
    ],
)
def test_a_window_counts_where_all_layers_have_it(config, window):
    sizes = {key: value for key, value in builtin_config("llama-3.1-8b").items() if "sliding" not in key}
    assert ModelSpec.from_config(sizes | config, "m").window == window


def test_a_model_without_a_window_keeps_the_fingerprint_it_had_before_there_were_any():
    assert SPEC.fingerprint == "5e620ccdb8d09c52"
    assert replace(SPEC, window=4096).fingerprint != SPEC.fingerprint
    with pytest.raises(InputError, match="window = 0"):
        replace(SPEC, window=0)


SIZES = {key: value for key, value in builtin_config("llama-3.1-8b").items() if "sliding" not in key}
QWEN = {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 512}


KEYS = ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")
NO_SIZES = ("2", True, 1.5, -1, 0, None, float("nan"), [2], {"a": 1})


@pytest.mark.parametrize(("key", "value"), [*itertools.product(KEYS, NO_SIZES), ("num_hidden_layers", 10**9)])
def test_a_size_that_is_none_is_named_as_the_config_names_it(key, value):
    with pytest.raises(InputError, match=f"^The config of model 'm' has {key} = .*: it must be a whole number"):
        ModelSpec.from_config(SIZES | {key: value}, "m")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"num_key_value_heads": -8}, "num_key_value_heads = -8"),
        ({"num_key_value_heads": 0}, "num_key_value_heads = 0"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no'"),
        ({"model_type": ["llama"]}, "not supported"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window = 0"),
        ({"model_type": "mistral", "sliding_window": "big"}, "sliding_window = 'big'"),
        (QWEN | {"layer_types": ["sliding_attention"]}, "layer_types = "),
        (QWEN | {"layer_types": "sliding"}, "layer_types = "),
        (QWEN | {"max_window_layers": "all"}, "max_window_layers = 'all'"),
    ],
)
def test_other_nonsense_in_a_config_is_named(config, named):
    with pytest.raises(InputError, match=named) as refused:
        ModelSpec.from_config(SIZES | config, "m")
    assert str(refused.value).endswith(".")


def test_a_missing_size_is_named():
    with pytest.raises(InputError, match="lacks the key 'vocab_size'"):
        ModelSpec.from_config({key: value for key, value in SIZES.items() if key != "vocab_size"}, "m")


LLAMAS = [SIZES | {"model_type": kind, "head_dim": None} for kind in ("llama", "mistral", "qwen2", "qwen3")]
LEARNED = [
    {"model_type": "gpt2", "n_embd": 4096, "n_head": 32, "n_layer": 2, "vocab_size": 500, "n_positions": 64},
    SIZES | {"model_type": "opt", "ffn_dim": 64},
]


@pytest.mark.parametrize("config", [*LLAMAS, *LEARNED], ids=lambda config: config["model_type"])
def test_heads_that_do_not_divide_the_hidden_size_are_refused(config):
    key = "n_head" if "n_head" in config else "num_attention_heads"
    assert ModelSpec.from_config(config | {key: 32}, "m").head_size == 128
    with pytest.raises(InputError, match=rf"= 4096 and {key} = 24, which does not divide it: correct one of them"):
        ModelSpec.from_config(config | {key: 24}, "m")


def test_heads_that_do_not_divide_the_hidden_size_are_read_with_a_head_size():
    for kind in ("llama", "mistral", "qwen2", "qwen3"):
        config = SIZES | {"model_type": kind, "num_attention_heads": 24, "head_dim": 160}
        assert ModelSpec.from_config(config, "m").head_size == 160


def test_a_qwen3_without_a_head_size_has_heads_of_128():
    config = {key: value for key, value in SIZES.items() if key != "head_dim"}
    config |= {"model_type": "qwen3", "num_attention_heads": 24}
    assert ModelSpec.from_config(config, "m").head_size == 128


@pytest.mark.parametrize("config", LLAMAS, ids=lambda config: config["model_type"])
def test_an_odd_head_size_is_refused_where_embeddings_are_rotary(config):
    with pytest.raises(InputError, match="heads of size 81: rotary embeddings need an even size"):
        ModelSpec.from_config(config | {"head_dim": 81}, "m")


def test_a_t5_has_no_longest_request():
    assert builtin_model("t5-11b").longest_request is None
    for name in ("llama-3.1-8b", "gpt2", "opt-13b"):
        spec = builtin_model(name)
        assert spec.longest_request == spec.context


@pytest.mark.parametrize(
    ("defaults", "sorts"),
    [
        (None, False),
        ({"temperature": 0.6}, False),
        ({"top_p": 1.0, "top_k": 0}, False),
        ({"top_p": 0.9}, True),
        ({"top_k": 20}, True),
        ({"top_p": None, "top_k": None}, False),
    ],
)
def test_a_directorys_generation_config_says_whether_logits_are_sorted(defaults, sorts, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(builtin_config("llama-3.1-8b")))
    if defaults is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(defaults))
    spec = ModelSpec.from_directory(tmp_path)
    assert spec.sorts_logits is sorts
    assert spec.fingerprint == SPEC.fingerprint  # it is no size


@pytest.mark.parametrize("text", ["[1]", "{"])
def test_a_broken_generation_config_is_refused(text, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(builtin_config("llama-3.1-8b")))
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(InputError, match=r"generation_config\.json"):
        ModelSpec.from_directory(tmp_path)
