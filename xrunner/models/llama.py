"""Llama: RMSNorm, rotary embedding, grouped-query attention, SwiGLU; and architectures that differ little from it.

Mistral's attention has a window. Qwen 2 adds biases to queries, keys and values, and may have a window in its later
layers. Qwen 3 normalises every head's query and key.
"""

import functools
import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F

from exegpt.kernels.norm import rms_norm
from exegpt.kernels.quantized_linear import Linear, gated_linear_of, linear_of
from exegpt.kernels.rotary import rotate_and_write
from xcore.architectures.config_sizes import number
from xcore.architectures.llama_family import attention_window
from xcore.errors import InputError
from xcore.specs.model import ModelSpec
from xrunner.models.row_chunks import in_row_chunks
from xrunner.models.shard import Shard
from xrunner.models.weights import Matrix, Weights, output_matrix

Shapes = dict[str, tuple[int, ...]]

PREFIX = ""
"""Prefix of tensor names that the first checkpoints left out: none."""
EXTRAS = (r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)",)
"""Tensors of checkpoints that the layers compute themselves."""


def unsupported(config: Mapping[str, object], name: str) -> dict[str, bool]:
    """Return for each key of a config whether these layers don't support its value."""
    kind, types = config.get("model_type"), config.get("layer_types") or []
    kinds = types if isinstance(types, list) else [types]
    _, _, partial = _rope(config, name)
    return {
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(config.get("attention_bias")) and kind != "qwen2",  # qwen2 always has its own biases
        "mlp_bias": bool(config.get("mlp_bias")),
        "sliding_window": bool(config.get("sliding_window")) and kind == "llama",
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0) != 1.0,
        "rope_parameters": partial,
        "layer_types": not {"sliding_attention", "full_attention"}.issuperset(kinds)
        or len(kinds) not in (0, config.get("num_hidden_layers")),
    }


def new_config(architecture: str, sizes: dict[str, int], end: int) -> dict[str, object]:
    """Return the sizes and the other fields of a new model's `config.json`; `end` is the token that ends a text."""
    return {
        "vocab_size": sizes["vocab"],
        "num_hidden_layers": sizes["layers"],
        "hidden_size": sizes["hidden"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "head_dim": sizes["head_size"],
        "intermediate_size": sizes["ffn"],
        "max_position_embeddings": sizes["context"],
        "architectures": [f"{architecture.capitalize()}ForCausalLM"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        **({"sliding_window": None} if architecture == "mistral" else {}),
    }


def outer_shapes(spec: ModelSpec) -> Shapes:
    """Return names and shapes of the tensors outside the layers."""
    shapes: Shapes = {"model.embed_tokens.weight": (spec.vocab, spec.hidden), "model.norm.weight": (spec.hidden,)}
    if not spec.tied_embeddings:
        shapes["lm_head.weight"] = (spec.vocab, spec.hidden)
    return shapes


def layer_shapes(spec: ModelSpec, layer: int) -> Shapes:
    """Return names and shapes of one layer's tensors."""
    query, kv = spec.heads * spec.head_size, spec.kv_heads * spec.head_size
    shapes: Shapes = {
        "input_layernorm": (spec.hidden,),
        "self_attn.q_proj": (query, spec.hidden),
        "self_attn.k_proj": (kv, spec.hidden),
        "self_attn.v_proj": (kv, spec.hidden),
        "self_attn.o_proj": (spec.hidden, query),
        "post_attention_layernorm": (spec.hidden,),
        "mlp.gate_proj": (spec.ffn, spec.hidden),
        "mlp.up_proj": (spec.ffn, spec.hidden),
        "mlp.down_proj": (spec.hidden, spec.ffn),
    }
    if spec.architecture == "qwen3":
        shapes |= {"self_attn.q_norm": (spec.head_size,), "self_attn.k_norm": (spec.head_size,)}
    shapes = {f"{name}.weight": shape for name, shape in shapes.items()}
    if spec.architecture == "qwen2":
        shapes |= {f"self_attn.{part}_proj.bias": shapes[f"self_attn.{part}_proj.weight"][:1] for part in "qkv"}
    return {f"model.layers.{layer}.{name}": shape for name, shape in shapes.items()}


_ROPE = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Types of rotary embeddings that can be run, and the parameters that each needs."""


def _rope(config: Mapping[str, object], name: str) -> tuple[str, dict[str, float], bool]:
    """Return the type of a config's rotary embeddings, its parameters, and whether a part of each head is rotated.

    Raises:
        InputError: The type is not known, or a parameter is missing or no positive number.
    """
    key = next((key for key in ("rope_parameters", "rope_scaling") if config.get(key)), None)
    parameters = {} if key is None else config[key]
    if not isinstance(parameters, dict):
        raise InputError(f"Model '{name}' has {key} = {parameters!r}: it must be an object.")
    theta = parameters.get("rope_theta") or config.get("rope_theta") or 10000.0
    parameters = {**parameters, "rope_theta": theta}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in _ROPE or any(isinstance(value, dict) for value in parameters.values()):
        kind = kind if kind not in _ROPE else "several"
        raise InputError(
            f"Model '{name}' has rotary embeddings of type '{kind}': only {', '.join(_ROPE)} are supported."
        )
    numbers: dict[str, float] = {}
    for needed in ("rope_theta", *_ROPE[kind]):
        value = parameters.get(needed)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise InputError(
                f"Model '{name}' has {key or 'a config'} with {needed} = {value!r}: '{kind}' needs a number."
            )
        numbers[needed] = value
    return kind, numbers, parameters.get("partial_rotary_factor", 1.0) != 1.0


def rotary_tables(config: Mapping[str, object], spec: ModelSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines by position, each float32 [context, head_size / 2]."""
    kind, parameters, _ = _rope(config, spec.name)
    theta = parameters["rope_theta"]
    frequencies = 1.0 / theta ** (torch.arange(0, spec.head_size, 2, dtype=torch.float32) / spec.head_size)
    if kind == "linear":
        frequencies = frequencies / parameters["factor"]
    elif kind == "llama3":
        frequencies = _llama3_frequencies(frequencies, parameters)
    angles = torch.outer(torch.arange(spec.context, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def _llama3_frequencies(frequencies: torch.Tensor, parameters: dict[str, float]) -> torch.Tensor:
    """Return the frequencies after Llama 3.1's context extension.

    Low frequencies are divided by `factor`, high ones kept, with a ramp between.
    """
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return torch.mul(frequencies, kept + (1 - kept) / parameters["factor"])


def build(
    spec: ModelSpec,
    config: Mapping[str, object],
    weights: Weights,
    layers: range,
    shard: Shard,
    embedding: bool,
    head: bool,
) -> "tuple[list[LlamaLayer], LlamaEnds]":
    """Return these layers, and the embedding and the head if requested."""
    tables = tuple(table.to(weights.device) for table in rotary_tables(config, spec))
    ends = LlamaEnds(spec, config, weights, embedding, head)
    return [LlamaLayer(spec, config, weights, layer, shard, tables) for layer in layers], ends


class LlamaLayer:
    """One decoder layer, or a shard of it.

    Its attention kernel is called between its two halves.
    """

    def __init__(
        self,
        spec: ModelSpec,
        config: Mapping[str, object],
        weights: Weights,
        layer: int,
        shard: Shard,
        tables: tuple[torch.Tensor, ...],
    ):
        self.spec = shard.share(spec)
        self.shard = shard
        shapes, sharded = layer_shapes(spec, layer), layer_shapes(self.spec, layer)

        def get(name: str) -> torch.Tensor:
            full = f"model.layers.{layer}.{name}"
            return shard.cut(weights.get(full, shapes[full]), sharded[full])

        def matrix(name: str) -> Matrix:
            full = f"model.layers.{layer}.{name}.weight"
            return shard.cut_matrix(weights.matrix(full, shapes[full]), sharded[full])

        def linear(*names: str) -> Linear:
            biases = [get(f"{name}.bias") for name in names if f"model.layers.{layer}.{name}.bias" in shapes]
            return linear_of([matrix(name) for name in names], biases)

        self.epsilon = number(config, "rms_norm_eps", 1e-6)
        self.cosines, self.sines = tables
        self.window = attention_window(config, layer)
        self.input_norm = get("input_layernorm.weight")
        self.qkv = linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.head_norm = None
        if spec.architecture == "qwen3":
            query, key = (get(f"self_attn.{part}_norm.weight") for part in "qk")
            self.head_norm = torch.cat((query.expand(self.spec.heads, -1), key.expand(self.spec.kv_heads, -1)))
            self.ones = torch.ones_like(query)
        self.output = linear("self_attn.o_proj")
        self.attention_norm = get("post_attention_layernorm.weight")
        self.gated = gated_linear_of(matrix("mlp.gate_proj"), matrix("mlp.up_proj"))
        self.down = linear("mlp.down_proj")

    def before_attention(
        self, x: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """Compute x [rows, hidden] → q [rows, heads, head_size]; see `decoder.Layer`."""
        spec, tokens = self.spec, len(slots)
        qkv = self.qkv(rms_norm(x, self.input_norm, self.epsilon)).view(len(x), -1, spec.head_size)
        both = spec.heads + spec.kv_heads
        if self.head_norm is not None:
            # This also normalises values, without need: rows with one stride need no copy.
            normed = rms_norm(qkv.view(-1, spec.head_size), self.ones, self.epsilon).view(qkv.shape)
            torch.mul(normed[:, :both], self.head_norm, out=qkv[:, :both])
        q, new = qkv[:, : spec.heads], qkv[:tokens]
        rotate_and_write(
            new[:, : spec.heads],
            new[:, spec.heads : both],
            new[:, both:],
            positions[:tokens],
            self.cosines,
            self.sines,
            keys,
            values,
            slots,
        )
        return q

    def after_attention(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Compute the layer's output from x [rows, hidden] and the attention's output [rows, heads, head_size].

        x is overwritten.
        """
        x = self.shard.all_reduce(self.output(attended.flatten(1), residual=self.shard.once(x)))
        return self.shard.all_reduce(in_row_chunks(lambda rows: self._feed_forward(*rows), x))

    def _feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.gated(rms_norm(x, self.attention_norm, self.epsilon))
        return self.down(inner, residual=self.shard.once(x))


class LlamaEnds:
    """The embedding, and the final norm and head, if a stage holds them."""

    def __init__(self, spec: ModelSpec, config: Mapping[str, object], weights: Weights, embedding: bool, head: bool):
        self.epsilon = number(config, "rms_norm_eps", 1e-6)
        table = functools.partial(weights.get, "model.embed_tokens.weight", (spec.vocab, spec.hidden))
        if embedding:
            self.embedding = table()
        if head:
            self.norm = weights.get("model.norm.weight", (spec.hidden,))
            self.head = linear_of([output_matrix(spec, weights, lambda: self.embedding if embedding else table())])

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Embed tokens: int64 [tokens] → [tokens, hidden]."""
        return F.embedding(tokens, self.embedding)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the logits: [rows, hidden] → [rows, vocab]."""
        return self.head(rms_norm(x, self.norm, self.epsilon))
