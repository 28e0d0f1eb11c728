"""GPT-2: LayerNorm, learned positions, biases everywhere, GELU in its tanh form."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from exegpt.kernels.kv_write import kv_write
from exegpt.kernels.linear import Activation, PackedLinear
from exegpt.kernels.norm import layer_norm
from xcore.architectures.config_sizes import number
from xcore.specs.model import ModelSpec
from xrunner.models.row_chunks import in_row_chunks
from xrunner.models.shard import Shard
from xrunner.models.weights import Weights, output_head, read

Shapes = dict[str, tuple[int, ...]]

PREFIX = "transformer."
"""Prefix of tensor names that the first checkpoints left out."""
EXTRAS = (r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",)
"""Causal masks, which old checkpoints contain."""


def unsupported(config: Mapping[str, object], name: str) -> dict[str, bool]:
    """Return for each key of a config whether these layers don't support its value."""
    return {
        "activation_function": config.get("activation_function", "gelu_new") not in ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": not config.get("scale_attn_weights", True),
        "scale_attn_by_inverse_layer_idx": bool(config.get("scale_attn_by_inverse_layer_idx")),
        "add_cross_attention": bool(config.get("add_cross_attention")),
    }


def new_config(architecture: str, sizes: dict[str, int], end: int) -> dict[str, object]:
    """Return the sizes and the other fields of a new model's `config.json`; `end` is the token that ends a text."""
    return {
        "vocab_size": sizes["vocab"],
        "n_layer": sizes["layers"],
        "n_embd": sizes["hidden"],
        "n_head": sizes["heads"],
        "n_inner": sizes["ffn"],
        "n_positions": sizes["context"],
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    }


def outer_shapes(spec: ModelSpec) -> Shapes:
    """Return names and shapes of the tensors outside the layers."""
    shapes: Shapes = {
        f"{PREFIX}wte.weight": (spec.vocab, spec.hidden),
        f"{PREFIX}wpe.weight": (spec.context, spec.hidden),
        f"{PREFIX}ln_f.weight": (spec.hidden,),
        f"{PREFIX}ln_f.bias": (spec.hidden,),
    }
    if not spec.tied_embeddings:
        shapes["lm_head.weight"] = (spec.vocab, spec.hidden)
    return shapes


def layer_shapes(spec: ModelSpec, layer: int) -> Shapes:
    """Return names and shapes of one layer's tensors; matrices are stored [inputs, outputs]."""
    shapes: Shapes = {}
    query = spec.heads * spec.head_size
    matrices = {
        "attn.c_attn": (spec.hidden, 3 * query),
        "attn.c_proj": (query, spec.hidden),
        "mlp.c_fc": (spec.hidden, spec.ffn),
        "mlp.c_proj": (spec.ffn, spec.hidden),
    }
    for name, shape in matrices.items():
        shapes[f"{name}.weight"] = shape
        shapes[f"{name}.bias"] = shape[1:]
    for name in ("ln_1", "ln_2"):
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (spec.hidden,)
    return {f"{PREFIX}h.{layer}.{name}": shape for name, shape in shapes.items()}


def build(
    spec: ModelSpec,
    config: Mapping[str, object],
    weights: Weights,
    layers: range,
    shard: Shard,
    embedding: bool,
    head: bool,
) -> "tuple[list[GPT2Layer], GPT2Ends]":
    """Return these layers, and the embedding and the head if requested."""
    ends = GPT2Ends(spec, config, weights, embedding, head)
    return [GPT2Layer(spec, config, weights, layer, shard) for layer in layers], ends


class GPT2Layer:
    """One decoder layer, or a shard of it.

    Its attention kernel is called between its two halves.
    """

    window = None

    def __init__(self, spec: ModelSpec, config: Mapping[str, object], weights: Weights, layer: int, shard: Shard):
        self.spec = shard.share(spec)
        self.shard = shard
        shapes, sharded = layer_shapes(spec, layer), layer_shapes(self.spec, layer)

        def get(name: str) -> torch.Tensor:
            full = f"{PREFIX}h.{layer}.{name}"
            side_by_side = 3 if name.startswith("attn.c_attn") else 1
            return shard.cut(read(weights, PREFIX, full, shapes[full]), sharded[full], side_by_side)

        def linear(name: str, activation: Activation | None = None) -> PackedLinear:
            weight, bias = get(f"{name}.weight").t().contiguous(), get(f"{name}.bias")
            return PackedLinear(weight, shard.once(bias) if name.endswith("c_proj") else bias, activation)

        self.epsilon = number(config, "layer_norm_epsilon", 1e-5)
        self.input_norm = get("ln_1.weight"), get("ln_1.bias")
        self.qkv = linear("attn.c_attn")
        self.output = linear("attn.c_proj")
        self.attention_norm = get("ln_2.weight"), get("ln_2.bias")
        self.up = linear("mlp.c_fc", activation="gelu_tanh")
        self.down = linear("mlp.c_proj")

    def before_attention(
        self, x: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """Compute x [rows, hidden] → q [rows, heads, head_size]; see `decoder.Layer`."""
        normed = layer_norm(x, *self.input_norm, self.epsilon)
        q, k, v = self.qkv(normed).view(len(x), 3, self.spec.heads, self.spec.head_size).unbind(1)
        kv_write(k[: len(slots)], v[: len(slots)], keys, values, slots)
        return q

    def after_attention(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Compute the layer's output from x [rows, hidden] and the attention's output [rows, heads, head_size].

        x is overwritten.
        """
        update = self.shard.all_reduce(self.output(attended.flatten(1)))
        return self.shard.all_reduce(in_row_chunks(lambda rows: self._feed_forward(*rows), update, x))

    def _feed_forward(self, update: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        normed = layer_norm(update, *self.attention_norm, self.epsilon, residual=x)
        return self.down(self.up(normed), residual=self.shard.once(x))


class GPT2Ends:
    """The embedding, and the final norm and head, if a stage holds them."""

    def __init__(self, spec: ModelSpec, config: Mapping[str, object], weights: Weights, embedding: bool, head: bool):
        shapes = outer_shapes(spec)

        def get(name: str) -> torch.Tensor:
            return read(weights, PREFIX, f"{PREFIX}{name}", shapes[f"{PREFIX}{name}"])

        self.spec = spec
        self.epsilon = number(config, "layer_norm_epsilon", 1e-5)
        if embedding:
            self.embedding, self.position_embedding = get("wte.weight"), get("wpe.weight")
        if head:
            self.norm = get("ln_f.weight"), get("ln_f.bias")
            self.head = PackedLinear(
                output_head(spec, weights, lambda: self.embedding if embedding else get("wte.weight"))
            )

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Embed tokens: int64 [tokens], positions int64 [tokens] → [tokens, hidden]."""
        return F.embedding(tokens, self.embedding) + F.embedding(positions, self.position_embedding)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the logits: [rows, hidden] → [rows, vocab]."""
        return self.head(layer_norm(x, *self.norm, self.epsilon))
