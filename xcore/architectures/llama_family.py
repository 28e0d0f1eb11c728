"""Llama, and dense architectures that differ little from it: Mistral, Qwen 2 and 3, Phi 3 and 4."""

import reprlib
from collections.abc import Mapping

from xcore.architectures.config_sizes import LAYERS, Config, even
from xcore.errors import InputError
from xcore.specs.model import ModelSpec, checked_size
from xcore.specs.windows import Windows


def grouped_query(config: Config, name: str) -> ModelSpec:
    """Read the sizes of a dense model with grouped-query attention and a gated feed-forward layer."""
    heads, layers = config.size("num_attention_heads"), config.layers(LAYERS)
    return ModelSpec(
        name=name,
        architecture=config.kind.removesuffix("_text"),
        layers=layers,
        hidden=config.size("hidden_size"),
        heads=heads,
        kv_heads=config.size("num_key_value_heads", heads),
        head_size=even(config.head_size("hidden_size", "num_attention_heads", "head_dim"), name),
        ffn=config.size("intermediate_size"),
        gated=True,
        vocab=config.size("vocab_size"),
        context=config.size("max_position_embeddings"),
        tied_embeddings=config.flag("tie_word_embeddings", False),
        window=_common_window(config.values, layers),
    )


def attention_window(config: Mapping[str, object], layer: int) -> int | None:
    """Return how many tokens a layer's tokens see, themselves and earlier ones; None for all.

    The rule is that of transformers: a Mistral config without a window has 4,096; a Qwen config has windows only if it
    enables them.
    """
    kind = config.get("model_type")
    if kind != "mistral" and (kind not in ("qwen2", "qwen3") or not config.get("use_sliding_window")):
        return None
    value = config.get("sliding_window", 4096)
    window = None if value is None else checked_size(value, "The config has sliding_window")
    if kind == "mistral":
        return window
    types, first = config.get("layer_types"), config.get("max_window_layers", 28)
    if types:
        if not isinstance(types, list) or layer >= len(types):
            raise InputError(
                f"The config has layer_types = {reprlib.repr(types)}: it must list the type of each layer."
            )
        return window if types[layer] == "sliding_attention" else None
    if not isinstance(first, int):
        raise InputError(f"The config has max_window_layers = {reprlib.repr(first)}: it must be a whole number.")
    return window if layer >= first else None


def _common_window(config: Mapping[str, object], layers: int) -> int | None:
    """Return the window of all layers; None if one of them sees everything, or they differ."""
    windows = {attention_window(config, layer) for layer in range(layers)}
    return windows.pop() if len(windows) == 1 else None


def windows_by_type(config: Config, layers: int, default: list[str], size: int) -> Windows | None:
    """Return the windows of a model whose config lists the type of each layer, or has the types of `default`.

    `size` is the window where the config names none.
    """
    types = config.values.get("layer_types") or default
    if not isinstance(types, list) or len(types) < layers:
        raise InputError(
            f"The config of model '{config.name}' has layer_types = {reprlib.repr(types)}: it must list the type of "
            "each layer."
        )
    sliding = sum(kind == "sliding_attention" for kind in types[:layers])
    return Windows(config.size("sliding_window", size), sliding) if sliding else None
