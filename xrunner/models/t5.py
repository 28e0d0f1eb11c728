"""T5: an encoder and a decoder with cross-attention; RMSNorm, relative position biases, no scaling of scores.

Version 1.0 has ReLU and scales the states before its tied head, 1.1 a GELU gate and a head of its own.
"""

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from exegpt.kernels.kv_write import kv_write
from exegpt.kernels.linear import Activation, PackedLinear
from exegpt.kernels.norm import rms_norm
from exegpt.kernels.swiglu import geglu
from xcore.architectures.config_sizes import number
from xcore.specs.model import ModelSpec
from xrunner.models.row_chunks import in_row_chunks
from xrunner.models.shard import Shard
from xrunner.models.weights import Weights, output_head

Shapes = dict[str, tuple[int, ...]]
Attend = Callable[[torch.Tensor], torch.Tensor]

_ACTIVATIONS = ("relu", "gated-gelu")

PREFIX = ""
"""Prefix of tensor names that the first checkpoints left out: none."""
EXTRAS = (
    r"(encoder|decoder)\.embed_tokens\.weight",  # copies of `shared.weight`, as transformers ties them
    # Cross-attention has no positions.
    r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
)
"""Tensors of published checkpoints that no layer uses."""


def unsupported(config: Mapping[str, object], name: str) -> dict[str, bool]:
    """Return for each key of a config whether these layers don't support its value."""
    return {"feed_forward_proj": config.get("feed_forward_proj", "relu") not in _ACTIVATIONS}


def new_config(architecture: str, sizes: dict[str, int], end: int) -> dict[str, object]:
    """Return the sizes and the other fields of a new model's `config.json`; `end` is the token that ends a text."""
    return {
        "vocab_size": sizes["vocab"],
        "num_layers": sizes["layers"],
        "num_decoder_layers": sizes["layers"],
        "d_model": sizes["hidden"],
        "num_heads": sizes["heads"],
        "d_kv": sizes["head_size"],
        "d_ff": sizes["ffn"],
        "n_positions": sizes["context"],
        "architectures": ["T5ForConditionalGeneration"],
        "feed_forward_proj": "gated-gelu",
        "is_encoder_decoder": True,
        "pad_token_id": end,
        "decoder_start_token_id": end,
        "tie_word_embeddings": False,
    }


def outer_shapes(spec: ModelSpec) -> Shapes:
    """Return names and shapes of the tensors outside the layers."""
    shapes: Shapes = {
        "shared.weight": (spec.vocab, spec.hidden),
        "encoder.final_layer_norm.weight": (spec.hidden,),
        "decoder.final_layer_norm.weight": (spec.hidden,),
        **{_bias_name(stack): (_BUCKETS, spec.heads) for stack in ("encoder", "decoder")},
    }
    if not spec.tied_embeddings:
        shapes["lm_head.weight"] = (spec.vocab, spec.hidden)
    return shapes


def layer_shapes(spec: ModelSpec, layer: int) -> Shapes:
    """Return names and shapes of the tensors of one layer of each stack, if the stack has that layer."""
    stacks = {"encoder": spec.encoder_layers, "decoder": spec.layers}
    return {k: v for stack, count in stacks.items() if layer < count for k, v in _shapes(spec, stack, layer).items()}


def _shapes(spec: ModelSpec, stack: str, layer: int) -> Shapes:
    query = spec.heads * spec.head_size
    blocks = ["SelfAttention"] + ["EncDecAttention"] * (stack == "decoder")
    shapes: Shapes = {}
    for place, block in enumerate(blocks):
        shapes |= {f"{place}.{block}.{part}": (query, spec.hidden) for part in "qkv"}
        shapes |= {f"{place}.{block}.o": (spec.hidden, query), f"{place}.layer_norm": (spec.hidden,)}
    feed_forward = f"{len(blocks)}.DenseReluDense"
    shapes |= {f"{feed_forward}.{up}": (spec.ffn, spec.hidden) for up in (("wi_0", "wi_1") if spec.gated else ("wi",))}
    shapes |= {f"{feed_forward}.wo": (spec.hidden, spec.ffn), f"{len(blocks)}.layer_norm": (spec.hidden,)}
    return {f"{stack}.block.{layer}.layer.{name}.weight": shape for name, shape in shapes.items()}


_BUCKETS = 32
"""Buckets of relative positions, in every published T5."""


def _bias_name(stack: str) -> str:
    return f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"


def relative_bias(
    spec: ModelSpec, config: Mapping[str, object], weights: Weights, stack: str, shard: Shard
) -> torch.Tensor:
    """Return the position bias by the distance from query to key, as `kernels/attention.py` takes it.

    float32 [heads, 2 · D + 1]; D is the distance from which on all distances share a bias.
    """
    buckets = int(number(config, "relative_attention_num_buckets", _BUCKETS))
    most = int(number(config, "relative_attention_max_distance", 128))
    table = weights.get(_bias_name(stack), (buckets, spec.heads))
    sharded = shard.cut(table, (buckets, shard.share(spec).heads))
    places = relative_buckets(most, buckets, both_ways=stack == "encoder").to(sharded.device)
    return sharded[places].T.float().contiguous()


def relative_buckets(most: int, buckets: int, both_ways: bool) -> torch.Tensor:
    """Return the bucket of every distance from -most to most (key after the query): int64 [2 · most + 1].

    Half of a direction's buckets are for one distance each, the other half for ranges that grow logarithmically. With
    `both_ways`, each direction has half of all buckets; otherwise, keys after the query count as at distance 0.
    """
    distance = torch.arange(-most, most + 1)
    ahead = torch.zeros_like(distance)
    if both_ways:
        buckets //= 2
        ahead = (distance > 0) * buckets
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = buckets // 2
    # In float32 and in this order, so that the ranges' edges fall where they did in training.
    growth = torch.log(distance.clamp(min=1).float() / exact) / math.log(most / exact) * (buckets - exact)
    far = (exact + growth.long()).clamp(max=buckets - 1)
    return ahead + torch.where(distance < exact, distance, far)


class T5Layer:
    """One layer of a stack, or a shard of it: self-attention, a decoder's cross-attention, and the feed-forward.

    The attention kernel is called between the halves of each attention.
    """

    window: int | None = None

    def __init__(
        self, spec: ModelSpec, config: Mapping[str, object], weights: Weights, stack: str, layer: int, shard: Shard
    ):
        self.spec = shard.share(spec)
        self.shard = shard
        self.epsilon = number(config, "layer_norm_epsilon", 1e-6)
        shapes, sharded = _shapes(spec, stack, layer), _shapes(self.spec, stack, layer)

        def get(name: str) -> torch.Tensor:
            full = f"{stack}.block.{layer}.layer.{name}.weight"
            return shard.cut(weights.get(full, shapes[full]), sharded[full])

        def linear(block: str, *names: str, activation: Activation | None = None) -> PackedLinear:
            return PackedLinear(torch.cat([get(f"{block}.{name}") for name in names]), activation=activation)

        self.input_norm = get("0.layer_norm")
        self.qkv, self.output = linear("0.SelfAttention", *"qkv"), linear("0.SelfAttention", "o")
        if stack == "decoder":
            self.cross_norm = get("1.layer_norm")
            self.cross_query, self.cross_output = (linear("1.EncDecAttention", name) for name in "qo")
            self.cross_projection = linear("1.EncDecAttention", *"kv")
        place = 2 if stack == "decoder" else 1
        self.feed_forward_norm = get(f"{place}.layer_norm")
        inner = f"{place}.DenseReluDense"
        self.up = linear(inner, "wi_0", "wi_1") if spec.gated else linear(inner, "wi", activation="relu")
        self.down = linear(inner, "wo")

    def before_attention(
        self, x: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """Compute x [rows, hidden] → q [rows, heads, head_size]; see `decoder.Layer`."""
        q, k, v = self._heads(self.qkv(rms_norm(x, self.input_norm, self.epsilon)), 3)
        kv_write(k[: len(slots)], v[: len(slots)], keys, values, slots)
        return q

    def after_attention(self, x: torch.Tensor, attended: torch.Tensor, cross: Attend | None = None) -> torch.Tensor:
        """Compute the layer's output from x [rows, hidden] and self-attention's output [rows, heads, head_size].

        x is overwritten. A decoder's layer gets `cross`, which computes cross-attention of its queries,
        [rows, heads, head_size] both.
        """
        x = self.shard.all_reduce(self.output(attended.flatten(1), residual=self.shard.once(x)))
        if cross:
            (q,) = self._heads(self.cross_query(rms_norm(x, self.cross_norm, self.epsilon)), 1)
            x = self.shard.all_reduce(self.cross_output(cross(q).flatten(1), residual=self.shard.once(x)))
        return self.shard.all_reduce(in_row_chunks(lambda rows: self._feed_forward(*rows), x))

    def cross_keys_values(self, encoded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute cross-attention's k and v from the encoder's output [tokens, hidden].

        Each is [tokens, heads, head_size].
        """
        k, v = self._heads(self.cross_projection(encoded), 2)
        return k, v

    def _feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.up(rms_norm(x, self.feed_forward_norm, self.epsilon))
        return self.down(geglu(inner) if self.spec.gated else inner, residual=self.shard.once(x))

    def _heads(self, x: torch.Tensor, parts: int) -> tuple[torch.Tensor, ...]:
        """Split [tokens, parts · heads · head_size] into `parts` tensors [tokens, heads, head_size]."""
        return x.view(len(x), parts, self.spec.heads, self.spec.head_size).unbind(1)


class T5Ends:
    """The embedding, the final norm of each stack, and the head, if a stage holds them."""

    def __init__(
        self,
        spec: ModelSpec,
        config: Mapping[str, object],
        weights: Weights,
        embedding: bool,
        encoder_end: bool,
        head: bool,
    ):
        def get(name: str) -> torch.Tensor:
            return weights.get(name, outer_shapes(spec)[name])

        self.epsilon = number(config, "layer_norm_epsilon", 1e-6)
        if embedding:
            self.embedding = get("shared.weight")
        self.encoder_norm = get("encoder.final_layer_norm.weight") if encoder_end else None
        if head:
            self.decoder_norm = get("decoder.final_layer_norm.weight")
            scaled = config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True))
            self.scale = spec.hidden**-0.5 if scaled else 1.0
            self.head = PackedLinear(
                output_head(spec, weights, lambda: self.embedding if embedding else get("shared.weight"))
            )

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Embed tokens: int64 [tokens] → [tokens, hidden]."""
        return F.embedding(tokens, self.embedding)

    def encoded(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the encoder's last layer's output: what cross-attention reads, [tokens, hidden]."""
        assert self.encoder_norm is not None, "the encoder ends on another stage"
        return rms_norm(x, self.encoder_norm, self.epsilon)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the logits: [rows, hidden] → [rows, vocab]."""
        return self.head(rms_norm(x, self.decoder_norm, self.epsilon) * self.scale)
