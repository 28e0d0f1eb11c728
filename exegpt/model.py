"""ModelSpec: the sizes of a transformer, and what follows from them: parameters, FLOPs, bytes, but no times."""

import functools
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from exegpt.errors import InputError
from exegpt.noun import Noun

Architecture = Literal["llama", "mistral", "qwen2", "qwen3", "gpt2", "opt", "t5"]

BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""Bytes of one value of each dtype."""


@dataclass(frozen=True)
class ModelSpec(Noun):
    """Sizes of one dense transformer. A decoder-only model has `encoder_layers` 0."""

    name: str
    architecture: Architecture
    layers: int
    """Decoder layers."""
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    """Width of the feed-forward layer."""
    gated: bool
    """Whether the feed-forward layer has a gate (three matrices instead of two)."""
    vocab: int
    context: int
    """Positions: the most tokens of input and output together."""
    encoder_layers: int = 0
    tied_embeddings: bool = False
    window: int | None = None
    """Tokens that a token sees, itself and those before it, where every layer has this window; None: all."""

    def __post_init__(self) -> None:
        for field in ("layers", "hidden", "heads", "kv_heads", "head_size", "ffn", "vocab", "context", "window"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise InputError(f"Model '{self.name}' has {field} = {value}: it must be at least 1.")
        if self.heads % self.kv_heads:
            raise InputError(
                f"Model '{self.name}' has {self.heads} heads, which its {self.kv_heads} KV heads do not divide."
            )

    @functools.cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits of the sizes; two models that differ in name alone have the same."""
        from exegpt.document import fingerprint, to_dict

        sizes = to_dict(replace(self, name=""))
        return fingerprint({name: size for name, size in sizes.items() if size is not None})  # what it lacks is no size

    def seen(self, new: float, past: float) -> float:
        """Tokens that `new` tokens after `past` see, all together."""
        most = self.window or math.inf
        within = min(max(most - past, 0.0), new)  # those whose window reaches back to the first token
        return within * past + within * (within + 1) / 2 + ((new - within) * most if new > within else 0.0)

    @property
    def _biased(self) -> bool:
        return self.architecture in ("gpt2", "opt")

    def attention_matrices(self, tp: int = 1) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of an attention block's matrix products on one of `tp` devices: QKV, then the output."""
        kv = -(-self.kv_heads // tp)  # fewer KV heads than devices: each keeps a copy of one
        q = self.heads // tp
        return ((q + 2 * kv) * self.head_size, self.hidden), (self.hidden, q * self.head_size)

    def ffn_matrices(self, tp: int = 1) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of a feed-forward block's matrix products on one of `tp` devices: up (and gate), down."""
        width = self.ffn // tp
        return (width * (2 if self.gated else 1), self.hidden), (self.hidden, width)

    def layer_matrices(self, tp: int = 1, encoder: bool = False) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of one layer's matrix products on one of `tp` devices.

        A decoder layer of an encoder-decoder has cross-attention too, with the shapes of self-attention.
        """
        attention = self.attention_matrices(tp)
        crosses = bool(self.encoder_layers) and not encoder
        return attention * (2 if crosses else 1) + self.ffn_matrices(tp)

    def token_matrices(self, tp: int = 1, encoder: bool = False) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of the matrix products that every token of a layer goes through on one of `tp` devices.

        All of the layer's, but for the keys and values of cross-attention: those are made from the encoded input once
        (`cross_projection`).
        """
        if encoder or not self.encoder_layers:
            return self.layer_matrices(tp, encoder)
        qkv, out = self.attention_matrices(tp)
        query = (self.heads // tp * self.head_size, self.hidden)
        return (qkv, out, query, out, *self.ffn_matrices(tp))

    def cross_projection(self, tp: int = 1) -> tuple[int, int]:
        """(outputs, inputs) of the product that makes a decoder layer's keys and values from the encoded input."""
        return 2 * -(-self.kv_heads // tp) * self.head_size, self.hidden

    @functools.cached_property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer."""
        count = sum(n * k for n, k in self.layer_matrices())
        norm = self.hidden * (2 if self._biased else 1)
        if self._biased:  # one bias for every matrix product's output
            count += sum(n for n, _ in self.layer_matrices())
        if self.architecture == "qwen2":
            count += self.attention_matrices()[0][0]
        if self.architecture == "qwen3":
            count += 2 * self.head_size
        return count + norm * (3 if self.encoder_layers else 2)

    @functools.cached_property
    def encoder_layer_parameters(self) -> int:
        """Parameters of one encoder layer; 0 for a decoder-only model."""
        if not self.encoder_layers:
            return 0
        return sum(n * k for n, k in self.layer_matrices(encoder=True)) + 2 * self.hidden

    @functools.cached_property
    def embedding_parameters(self) -> int:
        """Parameters of token and position embeddings (relative ones too, for T5)."""
        positions = {"gpt2": self.context * self.hidden, "opt": (self.context + 2) * self.hidden, "t5": 64 * self.heads}
        return self.vocab * self.hidden + positions.get(self.architecture, 0)

    @functools.cached_property
    def head_parameters(self) -> int:
        """Parameters of the final norms, and of the output head where it isn't the embedding again."""
        norm = self.hidden * (2 if self._biased or self.encoder_layers else 1)
        return norm + (0 if self.tied_embeddings else self.vocab * self.hidden)

    @functools.cached_property
    def parameters(self) -> int:
        """All parameters, a tied head counted once."""
        layers = self.layers * self.layer_parameters + self.encoder_layers * self.encoder_layer_parameters
        return layers + self.embedding_parameters + self.head_parameters

    def layer_bytes(self, tp: int = 1, dtype: str = "fp16", encoder: bool = False) -> float:
        """Bytes of one layer's weights on one of `tp` devices."""
        return (self.encoder_layer_parameters if encoder else self.layer_parameters) * BYTES[dtype] / tp

    def kv_bytes(self, tp: int = 1, dtype: str = "fp16") -> int:
        """Bytes of the keys and values of one token in one layer on one of `tp` devices."""
        return 2 * -(-self.kv_heads // tp) * self.head_size * BYTES[dtype]

    def tp_degrees(self, most: int) -> tuple[int, ...]:
        """Tensor-parallel degrees up to `most` that divide the heads, the KV heads (or are multiples) and the FFN."""

        def fits(tp: int) -> bool:
            kv = self.kv_heads % tp == 0 or tp % self.kv_heads == 0
            return self.heads % tp == 0 and self.ffn % tp == 0 and kv

        return tuple(tp for tp in (2**i for i in range(most.bit_length())) if tp <= most and fits(tp))

    @classmethod
    def from_config(cls, config: dict[str, Any], name: str) -> "ModelSpec":
        """The spec that a Hugging Face `config.json` describes; InputError for what isn't supported, by name."""
        kind = config.get("model_type")
        _refuse_unsupported(config, name)
        try:
            return _FROM_CONFIG[kind](config, name)  # type: ignore[index]
        except KeyError as error:
            raise InputError(f"The config of model '{name}' ({kind}) lacks the key {error}.") from None
        except TypeError as error:
            raise InputError(f"The config of model '{name}' ({kind}) has a value of a wrong type: {error}.") from None

    @classmethod
    def from_directory(cls, directory: str | Path) -> "ModelSpec":
        """The spec of a model directory in the Hugging Face layout."""
        return cls.from_config(read_config(directory), Path(directory).resolve().name)


def read_config(directory: str | Path) -> dict[str, Any]:
    """The `config.json` of a model directory; InputError where it is missing or broken."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise InputError(f"'{directory}' is not a model directory: it has no config.json.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"'{path}' is not valid JSON: {error}.") from None
    if not isinstance(config, dict):
        raise InputError(f"'{path}' does not hold a JSON object.")
    return config


def _refuse_unsupported(config: dict[str, Any], name: str) -> None:
    kind = config.get("model_type")
    if kind not in _FROM_CONFIG:
        known = ", ".join(sorted(_FROM_CONFIG))
        raise InputError(f"Model '{name}' is of type '{kind}', which is not supported: supported types are {known}.")
    if config.get("quantization_config"):
        raise InputError(f"Model '{name}' is a quantised checkpoint, which is not supported: use its original weights.")


def _llama(config: dict[str, Any], name: str) -> ModelSpec:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    return ModelSpec(
        name=name,
        architecture=config["model_type"],
        layers=config["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or (128 if config["model_type"] == "qwen3" else hidden // heads),
        ffn=config["intermediate_size"],
        gated=True,
        vocab=config["vocab_size"],
        context=config["max_position_embeddings"],
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        window=_common_window(config),
    )


def attention_window(config: dict[str, Any], layer: int) -> int | None:
    """How many tokens a layer's tokens see, themselves and those before them; None for all. As transformers reads it:
    a Mistral's config that doesn't say has 4096, a Qwen's has windows only where it asks for them.
    """
    kind = config.get("model_type")
    window: int | None = config.get("sliding_window", 4096)
    if kind == "mistral":
        return window
    if kind not in ("qwen2", "qwen3") or not config.get("use_sliding_window"):
        return None
    if config.get("layer_types"):
        return window if config["layer_types"][layer] == "sliding_attention" else None
    return window if layer >= config.get("max_window_layers", 28) else None


def _common_window(config: dict[str, Any]) -> int | None:
    """The window that all layers have; None where one sees everything, or they differ."""
    windows = {attention_window(config, layer) for layer in range(config["num_hidden_layers"])}
    return windows.pop() if len(windows) == 1 else None


def _gpt2(config: dict[str, Any], name: str) -> ModelSpec:
    heads, hidden = config["n_head"], config["n_embd"]
    return ModelSpec(
        name=name,
        architecture="gpt2",
        layers=config["n_layer"],
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_size=hidden // heads,
        ffn=config.get("n_inner") or 4 * hidden,
        gated=False,
        vocab=config["vocab_size"],
        context=config["n_positions"],
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
    )


def _opt(config: dict[str, Any], name: str) -> ModelSpec:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if config.get("word_embed_proj_dim", hidden) != hidden:
        raise InputError(f"Model '{name}' projects its embeddings (as opt-350m does), which is not supported.")
    return ModelSpec(
        name=name,
        architecture="opt",
        layers=config["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_size=hidden // heads,
        ffn=config["ffn_dim"],
        gated=False,
        vocab=config["vocab_size"],
        context=config["max_position_embeddings"],
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
    )


def _t5(config: dict[str, Any], name: str) -> ModelSpec:
    return ModelSpec(
        name=name,
        architecture="t5",
        layers=config.get("num_decoder_layers") or config["num_layers"],
        encoder_layers=config["num_layers"],
        hidden=config["d_model"],
        heads=config["num_heads"],
        kv_heads=config["num_heads"],
        head_size=config["d_kv"],
        ffn=config["d_ff"],
        gated=str(config.get("feed_forward_proj", "relu")).startswith("gated"),
        vocab=config["vocab_size"],
        context=config.get("n_positions", 512),
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
    )


_FROM_CONFIG = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "gpt2": _gpt2,
    "opt": _opt,
    "t5": _t5,
}
