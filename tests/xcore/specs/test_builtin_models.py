"""Every built-in spec against the model that transformers builds from the same config, without its weights."""

import pytest

from xcore.errors import InputError
from xcore.specs.builtin_models import HUB_IDS, builtin_config, builtin_model


@pytest.mark.parametrize("name", HUB_IDS)
def test_parameters_equal_those_of_transformers(name):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config, spec = builtin_config(name), builtin_model(name)
    config |= {"model_type": {"kimi_k2": "deepseek_v3"}.get(config["model_type"], config["model_type"])}
    auto = AutoModelForSeq2SeqLM if config["model_type"] == "t5" else AutoModelForCausalLM

    def count(layers: int) -> int:
        """Parameters of the model cut to `layers` layers (per side), tied ones once."""
        keys = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers")
        cut = config | {key: layers for key in keys if key in config} | {"quantization_config": None}
        cut.pop("layer_types", None)
        with torch.device("meta"):
            model = auto.from_config(AutoConfig.for_model(**cut))
        model.tie_weights()
        total = sum(p.numel() for p in model.parameters())
        head = model.get_output_embeddings().weight
        if head is model.get_input_embeddings().weight and config.get("tie_word_embeddings") is False:
            total += head.numel()  # T5 1.1: built tied, the checkpoint's own head parts them again when it is loaded
        return total

    if spec.experts:  # layers differ
        assert spec.parameters == pytest.approx(count(spec.layers), rel=1e-4)
    else:
        one_layer, two_layers = count(1), count(2)
        assert spec.parameters == one_layer + (spec.layers - 1) * (two_layers - one_layer)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("t5-11b", 11.3), ("opt-13b", 12.9), ("gpt3-39b", 39), ("gpt3-101b", 101), ("gpt3-175b", 175), ("gpt3-341b", 341)],
)
def test_the_papers_models_have_the_papers_sizes(name, billions):
    assert builtin_model(name).parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_hub_ids_and_case_name_the_same_model():
    assert builtin_model("facebook/opt-13b") == builtin_model("OPT-13B") == builtin_model("opt-13b")


def test_an_unknown_name_is_refused_with_near_matches():
    with pytest.raises(InputError, match=r"'opt-14b'.*opt-13b"):
        builtin_model("opt-14b")
    with pytest.raises(InputError, match="exegpt list models"):
        builtin_model("???")


@pytest.mark.parametrize(
    ("name", "sorts"),
    [
        ("llama-3.1-8b", True),
        ("meta-llama/Llama-3.3-70B-Instruct", True),
        ("Qwen/Qwen2.5-7B-Instruct", True),
        ("qwen3-32b", True),
        ("mistral-7b-v0.3", False),
        ("opt-13b", False),
        ("t5-11b", False),
    ],
)
def test_families_with_top_p_or_top_k_in_their_defaults_sort_logits(name, sorts):
    assert builtin_model(name).sorts_logits is sorts
