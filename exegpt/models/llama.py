"""Llama: RMSNorm, rotary embedding, grouped-query attention, SwiGLU. Mistral without a window is the same."""

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F

from exegpt.errors import InputError
from exegpt.kernels.linear import PackedLinear
from exegpt.kernels.norm import rms_norm
from exegpt.kernels.rotary import rotate
from exegpt.kernels.swiglu import swiglu
from exegpt.model import ModelSpec
from exegpt.models.pieces import in_pieces
from exegpt.models.shard import Shard
from exegpt.models.weights import Weights, output_head

Shapes = dict[str, tuple[int, ...]]


def check_config(config: dict[str, Any], name: str) -> None:
    """InputError for what these layers don't compute, by the config's key."""
    refused = {
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "sliding_window": (config.get("sliding_window") or math.inf) < config.get("max_position_embeddings", 0),
    }
    for key, bad in refused.items():
        if bad:
            raise InputError(f"Model '{name}' has {key} = {config[key]!r}, which can't be run.")


def outer_shapes(spec: ModelSpec) -> Shapes:
    """Names and shapes of the tensors outside the layers."""
    shapes: Shapes = {"model.embed_tokens.weight": (spec.vocab, spec.hidden), "model.norm.weight": (spec.hidden,)}
    if not spec.tied_embeddings:
        shapes["lm_head.weight"] = (spec.vocab, spec.hidden)
    return shapes


def layer_shapes(spec: ModelSpec, layer: int) -> Shapes:
    """Names and shapes of one layer's tensors."""
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
    return {f"model.layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}


def rotary_tables(config: dict[str, Any], spec: ModelSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines by position, each float32 [context, head_size / 2]."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = parameters.get("rope_theta") or config.get("rope_theta") or 10000.0
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    frequencies = 1.0 / theta ** (torch.arange(0, spec.head_size, 2, dtype=torch.float32) / spec.head_size)
    if kind == "linear":
        frequencies = frequencies / parameters["factor"]
    elif kind == "llama3":
        frequencies = _llama3_frequencies(frequencies, parameters)
    elif kind != "default":
        raise InputError(f"Model '{spec.name}' has rotary embeddings of type '{kind}': default, linear and llama3 run.")
    angles = torch.outer(torch.arange(spec.context, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def _llama3_frequencies(frequencies: torch.Tensor, parameters: dict[str, Any]) -> torch.Tensor:
    """Llama 3.1's stretching of the context: slow waves slowed by `factor`, fast ones kept, a ramp between."""
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / parameters["factor"])


class LlamaLayer:
    """One decoder layer, or a shard of it. Its attention kernel is called between its two halves."""

    def __init__(
        self, spec: ModelSpec, config: dict[str, Any], weights: Weights, layer: int, shard: Shard, tables: Any
    ):
        self.spec = shard.share(spec)
        self.shard = shard
        shapes, own = layer_shapes(spec, layer), layer_shapes(self.spec, layer)

        def get(name: str) -> torch.Tensor:
            full = f"model.layers.{layer}.{name}.weight"
            return shard.cut(weights.get(full, shapes[full]), own[full])

        self.epsilon = float(config.get("rms_norm_eps", 1e-6))
        self.cosines, self.sines = tables
        self.input_norm = get("input_layernorm")
        self.qkv = PackedLinear(torch.cat([get(f"self_attn.{part}_proj") for part in "qkv"]))
        self.output = PackedLinear(get("self_attn.o_proj"))
        self.attention_norm = get("post_attention_layernorm")
        self.gate_up = PackedLinear(torch.cat([get("mlp.gate_proj"), get("mlp.up_proj")]))
        self.down = PackedLinear(get("mlp.down_proj"))

    def before_attention(
        self, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [tokens, hidden] → q [tokens, heads, head_size], k and v [tokens, kv_heads, head_size]."""
        spec = self.spec
        qkv = self.qkv(rms_norm(x, self.input_norm, self.epsilon)).view(len(x), -1, spec.head_size)
        both = spec.heads + spec.kv_heads
        rotate(qkv[:, :both], positions, self.cosines, self.sines)
        return qkv[:, : spec.heads], qkv[:, spec.heads : both], qkv[:, both:]

    def after_attention(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden] and what attention gave, [tokens, heads, head_size] → the layer's output."""
        x = self.shard.all_reduce(self.output(attended.flatten(1), residual=self.shard.once(x)))
        return self.shard.all_reduce(in_pieces(self._feed_forward, x))

    def _feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = swiglu(self.gate_up(rms_norm(x, self.attention_norm, self.epsilon)))
        return self.down(inner, residual=self.shard.once(x))


class LlamaEnds:
    """What comes before the first layer and after the last, where a stage holds it."""

    def __init__(self, spec: ModelSpec, config: dict[str, Any], weights: Weights, embedding: bool, head: bool):
        self.epsilon = float(config.get("rms_norm_eps", 1e-6))
        table = functools.partial(weights.get, "model.embed_tokens.weight", (spec.vocab, spec.hidden))
        if embedding:
            self.embedding = table()
        if head:
            self.norm = weights.get("model.norm.weight", (spec.hidden,))
            self.head = PackedLinear(output_head(spec, weights, lambda: self.embedding if embedding else table()))

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int64 [tokens] → [tokens, hidden]."""
        return F.embedding(tokens, self.embedding)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, vocab]."""
        return self.head(rms_norm(x, self.norm, self.epsilon))
