"""ModelSpec: the sizes of a transformer, and the parameters, FLOPs and bytes that follow from them, but no times."""

import functools
import math
import reprlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from xcore.errors import InputError
from xcore.spec import Spec
from xcore.specs.quantization import refuse_quantised_config, refuse_quantised_files

Architecture = Literal["llama", "mistral", "qwen2", "qwen3", "gpt2", "opt", "t5"]

BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""Bytes of one value of each dtype."""
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""Dtypes by their names in a `config.json`."""


def activation_bytes(dtype: str) -> int:
    """Return the bytes of one value between layers, on links, in the embedding and in the output head.

    `dtype` is that of the layers. The other values stay in 16 bits if the layers' weights have 8.
    """
    return max(BYTES[dtype], 2)


def usual_kv_dtype(dtype: str) -> str:
    """Return the default dtype of keys and values: as in vLLM, never less than 16 bits."""
    return "bf16" if BYTES[dtype] < 2 else dtype


MAX_SIZE = 2**31 - 1
MAX_LAYERS = 10_000
"""Most layers of a model; more are probably a mistake."""


@dataclass(frozen=True)
class ModelSpec(Spec):
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
    """Positions of the checkpoint. `longest_request` limits requests."""
    encoder_layers: int = 0
    tied_embeddings: bool = False
    window: int | None = None
    """Number of tokens that a token sees, itself and earlier ones, if every layer has this window; None: all."""
    dtype: str | None = None
    """The checkpoint's own dtype; None: unknown. It is no size: models that differ only in it have one fingerprint."""
    sorts_logits: bool | None = None
    """Whether the checkpoint's `generation_config.json` has top-p or top-k; None: unknown. It is no size either.

    Engines then sort logits unless a request asks for other sampling.
    """

    def __post_init__(self) -> None:
        for field in ("hidden", "heads", "kv_heads", "head_size", "ffn", "vocab", "context"):
            _size(getattr(self, field), f"Model '{self.name}' has {field}")
        _size(self.layers, f"Model '{self.name}' has layers", MAX_LAYERS)
        if self.encoder_layers != 0:
            _size(self.encoder_layers, f"Model '{self.name}' has encoder_layers", MAX_LAYERS)
        if self.window is not None:
            _size(self.window, f"Model '{self.name}' has window")
        if self.heads % self.kv_heads:
            raise InputError(
                f"Model '{self.name}' has {self.heads} heads, which {self.kv_heads} KV heads do not divide."
            )

    @functools.cached_property
    def fingerprint(self) -> str:
        """Return sixteen hex digits of the sizes; two models that differ only in their names have the same."""
        from xcore.document import fingerprint, to_dict

        sizes = to_dict(self.sizes)
        return fingerprint(
            {name: size for name, size in sizes.items() if size is not None}
        )  # missing sizes don't count

    @functools.cached_property
    def layers_fingerprint(self) -> str:
        """Return sixteen hex digits of the sizes without the context, which times of iterations don't depend on."""
        from xcore.document import fingerprint, to_dict

        sizes = to_dict(self.sizes)
        return fingerprint({k: size for k, size in sizes.items() if size is not None and k != "context"})

    @property
    def sizes(self) -> "ModelSpec":
        """Return this spec with its sizes only: without its name, and its checkpoint's dtype and sampling."""
        return replace(self, name="", dtype=None, sorts_logits=None)

    @property
    def longest_request(self) -> int | None:
        """Return the most tokens of input and output together; None: any number, since T5's positions are relative."""
        return None if self.architecture == "t5" else self.context

    def seen(self, new: float, past: float) -> float:
        """Return the sum of the tokens that each of `new` tokens after `past` sees."""
        most = self.window or math.inf
        within = min(max(most - past, 0.0), new)  # those whose window reaches back to the first token
        return within * past + within * (within + 1) / 2 + ((new - within) * most if new > within else 0.0)

    @property
    def _biased(self) -> bool:
        return self.architecture in ("gpt2", "opt")

    def attention_matrices(self, tp: int = 1) -> tuple[tuple[int, int], ...]:
        """Return (outputs, inputs) of an attention block's products on one of `tp` devices: QKV, then the output."""
        kv = -(-self.kv_heads // tp)  # fewer KV heads than devices: each keeps a copy of one
        q = self.heads // tp
        return ((q + 2 * kv) * self.head_size, self.hidden), (self.hidden, q * self.head_size)

    def ffn_matrices(self, tp: int = 1) -> tuple[tuple[int, int], ...]:
        """Return (outputs, inputs) of a feed-forward block's products on one of `tp` devices: up (and gate), down."""
        width = self.ffn // tp
        return (width * (2 if self.gated else 1), self.hidden), (self.hidden, width)

    def layer_matrices(self, tp: int = 1, encoder: bool = False) -> tuple[tuple[int, int], ...]:
        """Return (outputs, inputs) of one layer's matrix products on one of `tp` devices.

        A decoder layer of an encoder-decoder has cross-attention too, with the shapes of self-attention.
        """
        attention = self.attention_matrices(tp)
        crosses = bool(self.encoder_layers) and not encoder
        return attention * (2 if crosses else 1) + self.ffn_matrices(tp)

    def token_matrices(self, tp: int = 1, encoder: bool = False) -> tuple[tuple[int, int], ...]:
        """Return (outputs, inputs) of the products that every token of a layer goes through on one of `tp` devices.

        These are all products of the layer except the keys and values of cross-attention, which are computed once from
        the encoded input (`cross_projection`).
        """
        if encoder or not self.encoder_layers:
            return self.layer_matrices(tp, encoder)
        qkv, out = self.attention_matrices(tp)
        query = (self.heads // tp * self.head_size, self.hidden)
        return (qkv, out, query, out, *self.ffn_matrices(tp))

    def cross_projection(self, tp: int = 1) -> tuple[int, int]:
        """Return (outputs, inputs) of the product for a decoder layer's keys and values of the encoded input."""
        return 2 * -(-self.kv_heads // tp) * self.head_size, self.hidden

    @functools.cached_property
    def layer_parameters(self) -> int:
        """Return the parameters of one decoder layer."""
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
        """Return the parameters of one encoder layer; 0 for a decoder-only model."""
        if not self.encoder_layers:
            return 0
        return sum(n * k for n, k in self.layer_matrices(encoder=True)) + 2 * self.hidden

    @functools.cached_property
    def embedding_parameters(self) -> int:
        """Return the parameters of token and position embeddings (relative ones too, for T5)."""
        positions = {"gpt2": self.context * self.hidden, "opt": (self.context + 2) * self.hidden, "t5": 64 * self.heads}
        return self.vocab * self.hidden + positions.get(self.architecture, 0)

    @functools.cached_property
    def head_parameters(self) -> int:
        """Return the parameters of the final norms, and of the output head unless it is tied to the embedding."""
        norm = self.hidden * (2 if self._biased or self.encoder_layers else 1)
        return norm + (0 if self.tied_embeddings else self.vocab * self.hidden)

    @functools.cached_property
    def parameters(self) -> int:
        """Return the number of all parameters; a tied head counts once."""
        layers = self.layers * self.layer_parameters + self.encoder_layers * self.encoder_layer_parameters
        return layers + self.embedding_parameters + self.head_parameters

    def layer_bytes(self, tp: int = 1, dtype: str = "fp16", encoder: bool = False) -> float:
        """Return the bytes of one layer's weights on one of `tp` devices."""
        return (self.encoder_layer_parameters if encoder else self.layer_parameters) * BYTES[dtype] / tp

    def kv_bytes(self, tp: int = 1, dtype: str = "fp16") -> int:
        """Return the bytes of the keys and values of one token in one layer on one of `tp` devices."""
        return 2 * -(-self.kv_heads // tp) * self.head_size * BYTES[dtype]

    def tp_degrees(self, most: int) -> tuple[int, ...]:
        """Return the tensor-parallel degrees up to `most` that a model allows.

        A degree divides the heads and the FFN, and divides the KV heads or is a multiple of them.
        """

        def fits(tp: int) -> bool:
            kv = self.kv_heads % tp == 0 or tp % self.kv_heads == 0
            return self.heads % tp == 0 and self.ffn % tp == 0 and kv

        return tuple(tp for tp in (2**i for i in range(most.bit_length())) if tp <= most and fits(tp))

    @classmethod
    def from_config(cls, config: dict[str, Any], name: str) -> "ModelSpec":
        """Build the spec that a Hugging Face `config.json` describes; InputError names what isn't supported."""
        _refuse_unsupported(config, name)
        spec = _FROM_CONFIG[config["model_type"]](_Config(config, name), name)
        kept = config.get("dtype", config.get("torch_dtype"))
        return replace(spec, dtype=DTYPES.get(kept) if isinstance(kept, str) else None)

    @classmethod
    def from_directory(cls, directory: str | Path) -> "ModelSpec":
        """Read the spec of a model directory in the Hugging Face layout."""
        path = Path(directory)
        name = path.resolve().name
        config = read_config(path)
        refuse_quantised_files(path, name)
        return replace(cls.from_config(config, name), sorts_logits=_sorts_logits(path))


def read_config(directory: str | Path) -> dict[str, Any]:
    """Read the `config.json` of a model directory; InputError if it is missing or broken."""
    from xcore.document import read_json

    path = Path(directory) / "config.json"
    if not path.exists():
        raise InputError(f"'{directory}' is not a model directory: it has no config.json.")
    config = read_json(path)
    if not isinstance(config, dict):
        raise InputError(f"'{path}' does not hold a JSON object.")
    return config


def _sorts_logits(directory: Path) -> bool:
    """Return whether the sampling defaults of a model directory have top-p or top-k."""
    from xcore.document import read_json

    path = directory / "generation_config.json"
    defaults = read_json(path) if path.exists() else {}
    if not isinstance(defaults, dict):
        raise InputError(f"'{path}' does not hold a JSON object.")
    top_p, top_k = (defaults.get(name) for name in ("top_p", "top_k"))
    return (isinstance(top_p, int | float) and top_p < 1) or (isinstance(top_k, int) and top_k > 0)


def _refuse_unsupported(config: dict[str, Any], name: str) -> None:
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _FROM_CONFIG:
        known = ", ".join(sorted(_FROM_CONFIG))
        raise InputError(f"Model '{name}' is of type '{kind}', which is not supported: supported types are {known}.")
    refuse_quantised_config(config, name)


def _size(value: Any, what: str, most: int = MAX_SIZE) -> int:
    """Return the value, a whole number from 1 to `most`; otherwise raise InputError, which begins with `what`."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise InputError(f"{what} = {reprlib.repr(value)}: it must be a whole number from 1 to {most:,}.")
    return value


@dataclass(frozen=True)
class _Config:
    """A `config.json` whose sizes are checked on access, by the file's own names."""

    values: dict[str, Any]
    name: str

    def size(self, key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        """Return the size of this name, or the default if it is missing or null; InputError without a default."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if key not in self.values:
            raise InputError(f"The config of model '{self.name}' lacks the key '{key}'.")
        return _size(value, f"The config of model '{self.name}' has {key}", most)

    def layers(self, key: str, default: int | None = None) -> int:
        """Return a number of layers."""
        return self.size(key, default, MAX_LAYERS)

    def head_size(self, hidden_key: str, heads_key: str, key: str | None = None) -> int:
        """Return the size of a head: the value of `key` if the config has it, else the hidden size over the heads.

        Raises:
            InputError: The heads don't divide the hidden size.
        """
        if key is not None and self.values.get(key) is not None:
            return self.size(key)
        if key is not None and key not in self.values and self.values["model_type"] == "qwen3":
            return 128  # transformers' default for this family
        hidden, heads = self.size(hidden_key), self.size(heads_key)
        if hidden % heads:
            way_out = f"correct one of them{f', or add {key}' if key else ''}"
            raise InputError(
                f"The config of model '{self.name}' has {hidden_key} = {hidden} and {heads_key} = {heads}, which does "
                f"not divide it: {way_out}."
            )
        return hidden // heads

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean; the default if it is missing or null."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            what = f"The config of model '{self.name}' has {key} = {reprlib.repr(value)}"
            raise InputError(f"{what}: it must be true or false.")
        return default if value is None else value


def _llama(config: _Config, name: str) -> ModelSpec:
    kind = config.values["model_type"]
    heads, hidden, layers = config.size("num_attention_heads"), config.size("hidden_size"), config.layers(_LAYERS)
    return ModelSpec(
        name=name,
        architecture=kind,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=config.size("num_key_value_heads", heads),
        head_size=_even(config.head_size("hidden_size", "num_attention_heads", "head_dim"), name),
        ffn=config.size("intermediate_size"),
        gated=True,
        vocab=config.size("vocab_size"),
        context=config.size("max_position_embeddings"),
        tied_embeddings=config.flag("tie_word_embeddings", False),
        window=_common_window(config.values, layers),
    )


def _even(head_size: int, name: str) -> int:
    """Return the head size, whose halves rotary embeddings rotate; InputError for an odd one."""
    if head_size % 2:
        raise InputError(
            f"Model '{name}' has heads of size {head_size}: rotary embeddings need an even size; correct its config."
        )
    return head_size


_LAYERS = "num_hidden_layers"


def attention_window(config: dict[str, Any], layer: int) -> int | None:
    """Return how many tokens a layer's tokens see, themselves and earlier ones; None for all.

    The rule is that of transformers: a Mistral config without a window has 4,096; a Qwen config has windows only if it
    enables them.
    """
    kind = config.get("model_type")
    if kind != "mistral" and (kind not in ("qwen2", "qwen3") or not config.get("use_sliding_window")):
        return None
    window: int | None = config.get("sliding_window", 4096)
    if window is not None:
        _size(window, "The config has sliding_window")
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


def _common_window(config: dict[str, Any], layers: int) -> int | None:
    """Return the window of all layers; None if one of them sees everything, or they differ."""
    windows = {attention_window(config, layer) for layer in range(layers)}
    return windows.pop() if len(windows) == 1 else None


def _gpt2(config: _Config, name: str) -> ModelSpec:
    heads, hidden = config.size("n_head"), config.size("n_embd")
    return ModelSpec(
        name=name,
        architecture="gpt2",
        layers=config.layers("n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_size=config.head_size("n_embd", "n_head"),
        ffn=config.size("n_inner", 4 * hidden),
        gated=False,
        vocab=config.size("vocab_size"),
        context=config.size("n_positions"),
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )


def _opt(config: _Config, name: str) -> ModelSpec:
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    if config.values.get("word_embed_proj_dim", hidden) != hidden:
        raise InputError(f"Model '{name}' projects its embeddings (as opt-350m does), which is not supported.")
    return ModelSpec(
        name=name,
        architecture="opt",
        layers=config.layers(_LAYERS),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_size=config.head_size("hidden_size", "num_attention_heads"),
        ffn=config.size("ffn_dim"),
        gated=False,
        vocab=config.size("vocab_size"),
        context=config.size("max_position_embeddings"),
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )


def _t5(config: _Config, name: str) -> ModelSpec:
    layers, heads = config.layers("num_layers"), config.size("num_heads")
    return ModelSpec(
        name=name,
        architecture="t5",
        layers=config.layers("num_decoder_layers", layers),
        encoder_layers=layers,
        hidden=config.size("d_model"),
        heads=heads,
        kv_heads=heads,
        head_size=config.size("d_kv"),
        ffn=config.size("d_ff"),
        gated=str(config.values.get("feed_forward_proj", "relu")).startswith("gated"),
        vocab=config.size("vocab_size"),
        context=config.size("n_positions", 512),
        tied_embeddings=config.flag("tie_word_embeddings", True),
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
