"""OPT: GPT-2's layer with ReLU, under other names; positions begin at 2."""

from collections.abc import Mapping

import torch

from exegpt.kernels.linear import PackedLinear
from xcore.specs.model import ModelSpec
from xrunner.models.gpt2 import GPT2Ends, GPT2Layer, Shapes
from xrunner.models.shard import Shard
from xrunner.models.weights import Weights, output_head, read

PREFIX = "model."
"""Prefix of tensor names that the first checkpoints left out."""
_FIRST_POSITION = 2
_EPSILON = 1e-5

EXTRAS: tuple[str, ...] = ()


def unsupported(config: Mapping[str, object], name: str) -> dict[str, bool]:
    """Return for each key of a config whether these layers don't support its value."""
    return {
        "do_layer_norm_before": not config.get("do_layer_norm_before", True),  # opt-350m
        "activation_function": config.get("activation_function", "relu") != "relu",
        "enable_bias": not config.get("enable_bias", True),
        "layer_norm_elementwise_affine": not config.get("layer_norm_elementwise_affine", True),
        "_remove_final_layer_norm": bool(config.get("_remove_final_layer_norm")),
    }


def new_config(architecture: str, sizes: dict[str, int], end: int) -> dict[str, object]:
    """Return the sizes and the other fields of a new model's `config.json`; `end` is the token that ends a text."""
    return {
        "vocab_size": sizes["vocab"],
        "num_hidden_layers": sizes["layers"],
        "hidden_size": sizes["hidden"],
        "word_embed_proj_dim": sizes["hidden"],
        "num_attention_heads": sizes["heads"],
        "ffn_dim": sizes["ffn"],
        "max_position_embeddings": sizes["context"],
        "architectures": ["OPTForCausalLM"],
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "pad_token_id": end,
        "tie_word_embeddings": True,
    }


def outer_shapes(spec: ModelSpec) -> Shapes:
    """Return names and shapes of the tensors outside the layers."""
    shapes: Shapes = {
        "embed_tokens.weight": (spec.vocab, spec.hidden),
        "embed_positions.weight": (spec.context + _FIRST_POSITION, spec.hidden),
        "final_layer_norm.weight": (spec.hidden,),
        "final_layer_norm.bias": (spec.hidden,),
    }
    shapes = {f"{PREFIX}decoder.{name}": shape for name, shape in shapes.items()}
    if not spec.tied_embeddings:
        shapes["lm_head.weight"] = (spec.vocab, spec.hidden)
    return shapes


def layer_shapes(spec: ModelSpec, layer: int) -> Shapes:
    """Return names and shapes of one layer's tensors."""
    query = spec.heads * spec.head_size
    shapes: Shapes = {f"self_attn.{part}_proj.weight": (query, spec.hidden) for part in "qkv"}
    shapes |= {
        "self_attn.out_proj.weight": (spec.hidden, query),
        "fc1.weight": (spec.ffn, spec.hidden),
        "fc2.weight": (spec.hidden, spec.ffn),
        "self_attn_layer_norm.weight": (spec.hidden,),
        "final_layer_norm.weight": (spec.hidden,),
    }
    shapes |= {name.replace(".weight", ".bias"): shape[:1] for name, shape in shapes.items()}
    return {f"{PREFIX}decoder.layers.{layer}.{name}": shape for name, shape in shapes.items()}


def build(
    spec: ModelSpec,
    config: Mapping[str, object],
    weights: Weights,
    layers: range,
    shard: Shard,
    embedding: bool,
    head: bool,
) -> tuple[list[GPT2Layer], GPT2Ends]:
    """Return these layers, and the embedding and the head if requested."""
    ends = OPTEnds(spec, weights, embedding, head)
    return [OPTLayer(spec, weights, layer, shard) for layer in layers], ends


class OPTLayer(GPT2Layer):
    """One decoder layer, or a shard of it."""

    def __init__(self, spec: ModelSpec, weights: Weights, layer: int, shard: Shard):
        self.spec = shard.share(spec)
        self.shard = shard
        self.epsilon = _EPSILON
        shapes, sharded = layer_shapes(spec, layer), layer_shapes(self.spec, layer)

        def get(name: str) -> torch.Tensor:
            full = f"{PREFIX}decoder.layers.{layer}.{name}"
            return shard.cut(read(weights, PREFIX, full, shapes[full]), sharded[full])

        def both(name: str) -> tuple[torch.Tensor, torch.Tensor]:
            return get(f"{name}.weight"), get(f"{name}.bias")

        def summed(name: str) -> PackedLinear:
            weight, bias = both(name)
            return PackedLinear(weight, shard.once(bias))

        query, key, value = (both(f"self_attn.{part}_proj") for part in "qkv")
        self.input_norm = both("self_attn_layer_norm")
        weight, bias = (torch.cat(parts) for parts in zip(query, key, value, strict=True))
        self.qkv = PackedLinear(weight, bias)
        self.output = summed("self_attn.out_proj")
        self.attention_norm = both("final_layer_norm")
        self.up = PackedLinear(*both("fc1"), activation="relu")
        self.down = summed("fc2")


class OPTEnds(GPT2Ends):
    """The embedding, and the final norm and head, if a stage holds them."""

    def __init__(self, spec: ModelSpec, weights: Weights, embedding: bool, head: bool):
        shapes = outer_shapes(spec)

        def get(name: str) -> torch.Tensor:
            full = f"{PREFIX}decoder.{name}"
            return read(weights, PREFIX, full, shapes[full])

        self.spec = spec
        self.epsilon = _EPSILON
        if embedding:
            self.embedding = get("embed_tokens.weight")
            self.position_embedding = get("embed_positions.weight")[_FIRST_POSITION:]
        if head:
            self.norm = get("final_layer_norm.weight"), get("final_layer_norm.bias")
            self.head = PackedLinear(
                output_head(spec, weights, lambda: self.embedding if embedding else get("embed_tokens.weight"))
            )
