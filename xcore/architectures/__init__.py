"""The sizes of each architecture from its config.json: one file for each family, without torch."""

from collections.abc import Callable, Mapping

from xcore.architectures.config_sizes import Config
from xcore.architectures.deepseek_family import deepseek_v3
from xcore.architectures.gemma_family import gemma2, gemma3
from xcore.architectures.glm_family import glm4_moe
from xcore.architectures.gpt_family import gpt2, opt
from xcore.architectures.gpt_oss_family import gpt_oss
from xcore.architectures.llama4_family import llama4
from xcore.architectures.llama_family import grouped_query
from xcore.architectures.mixtral_family import mixtral
from xcore.architectures.qwen_moe_family import qwen3_moe
from xcore.architectures.t5_family import t5
from xcore.errors import InputError
from xcore.specs.model import ModelSpec

_READERS: dict[str, Callable[[Config, str], ModelSpec]] = {
    "llama": grouped_query,
    "mistral": grouped_query,
    "qwen2": grouped_query,
    "qwen3": grouped_query,
    "phi3": grouped_query,
    "gpt2": gpt2,
    "opt": opt,
    "t5": t5,
    "mixtral": mixtral,
    "minimax_m2": mixtral,
    "qwen3_moe": qwen3_moe,
    "glm4_moe": glm4_moe,
    "gpt_oss": gpt_oss,
    "deepseek_v3": deepseek_v3,
    "kimi_k2": deepseek_v3,
    "glm_moe_dsa": deepseek_v3,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "llama4_text": llama4,
}
"""`model_type` of a config.json, or of its text part → the function that reads the sizes."""
_TEXT_PARTS = ("gemma3", "kimi_k25", "llama4", "mistral3")
"""Types of models that read images too: their `text_config` is planned."""


def read_sizes(config: Mapping[str, object], name: str) -> ModelSpec:
    """Return the sizes that a config.json describes; of a model that reads images too, those of its text part.

    Raises:
        InputError: The type isn't supported, or a size is missing or wrong.
    """
    kind, text = config.get("model_type"), config.get("text_config")
    if kind in _TEXT_PARTS and isinstance(text, dict):
        both = ("quantization_config", "tie_word_embeddings")
        return read_sizes({key: config[key] for key in both if key in config} | text, name)
    if not isinstance(kind, str) or kind not in _READERS:
        known = ", ".join(sorted(_READERS))
        raise InputError(f"Model '{name}' is of type '{kind}', which is not supported: supported types are {known}.")
    return _READERS[kind](Config(config, name), name)
