"""Model: a decoder-only transformer as its layers and what comes before and after them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from exegpt.errors import InputError
from exegpt.kernels.argmax import argmax
from exegpt.kernels.kv_write import kv_write
from exegpt.model import ModelSpec, read_config
from exegpt.models.batch import Batch, attend
from exegpt.models.cache import KVCache
from exegpt.models.families import FAMILIES, check_runnable
from exegpt.models.shard import WHOLE, Shard
from exegpt.models.weights import RandomWeights, SafetensorsWeights, Weights, torch_dtype


class Layer(Protocol):
    """One layer in two halves; between them its keys and values are cached and the attention kernel runs."""

    window: int | None
    """How many tokens a token sees, itself and those before it; None for all."""

    def before_attention(
        self, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [tokens, hidden] → q [tokens, heads, head_size], k and v [tokens, kv_heads, head_size]."""

    def after_attention(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden], attended [tokens, heads, head_size] → the layer's output [tokens, hidden]."""


class Ends(Protocol):
    """What comes before the first layer and after the last; a stage may hold one of them, or neither."""

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int64 [tokens], int64 [tokens] → [tokens, hidden]."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] → [rows, vocab]."""


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer or a stage of one: some of its layers, whole or a shard of each."""

    spec: ModelSpec
    """The whole model's sizes."""
    dtype: str
    layers: tuple[Layer, ...]
    ends: Ends
    eos: frozenset[int]
    """Tokens that end an output."""
    shard: Shard = WHOLE
    head: bool = True
    """Whether tokens come out; else the states of every row, which the next stage takes."""

    def new_cache(self, blocks: int, block_size: int) -> KVCache:
        """An empty KV cache for this model's layers."""
        return KVCache.allocate(self.share, len(self.layers), blocks, block_size, self.dtype)

    @property
    def share(self) -> ModelSpec:
        """The sizes of this device's shard."""
        return self.shard.share(self.spec)

    def sample(self, x: torch.Tensor) -> torch.Tensor:
        """Final norm, head and greedy choice: [rows, hidden] → int64 [rows]."""
        return argmax(self.ends.logits(x))

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache, x: torch.Tensor | None = None) -> torch.Tensor:
        """One iteration: caches the batch's tokens and returns the final states [rows, hidden] that need a token.

        A stage without the embedding gets `x`, the states [rows, hidden] of the stage before; one without the head
        returns those of all rows.
        """
        x = self.ends.embed(batch.tokens, batch.positions) if x is None else x
        tokens = len(batch.slots)
        for layer, keys, values in zip(self.layers, cache.keys, cache.values, strict=True):
            q, k, v = layer.before_attention(x, batch.positions)
            kv_write(k[:tokens], v[:tokens], keys, values, batch.slots)
            x = layer.after_attention(x, attend(q, keys, values, batch.attention, window=layer.window))
        return x if batch.rows is None or not self.head else x[batch.rows]

    @torch.inference_mode()
    def step(self, batch: Batch, cache: KVCache, x: torch.Tensor | None = None) -> torch.Tensor:
        """`forward`, then the next token of every row: int64 [rows]."""
        x = self.forward(batch, cache, x)
        return self.sample(x) if len(x) else torch.empty(0, dtype=torch.int64)


def load_model(
    directory: str | Path,
    dtype: str = "fp32",
    layers: range | int | None = None,
    shard: Shard = WHOLE,
    embedding: bool = True,
    head: bool = True,
) -> Model:
    """The model of a directory in the Hugging Face layout, or a stage of it: these layers or the first so many, whole
    or a shard of each, with or without the embedding and the head. Only its own tensors are read.

    InputError for what can't be run, cut or read.
    """
    config = read_config(directory)
    spec = ModelSpec.from_directory(directory)
    weights = SafetensorsWeights(directory, torch_dtype(dtype))
    return _build(spec, config, weights, dtype, layers, _eos(Path(directory), config), shard, embedding, head)


def random_model(
    spec: ModelSpec, layers: range | int | None = None, dtype: str = "fp32", seed: int = 0, shard: Shard = WHOLE
) -> Model:
    """A model of these sizes with random weights, of all layers or only so many: what the profiler measures."""
    weights = RandomWeights(torch_dtype(dtype), seed)
    return _build(spec, {}, weights, dtype, layers, frozenset(), shard)


@torch.inference_mode()
def _build(
    spec: ModelSpec,
    config: dict[str, Any],
    weights: Weights,
    dtype: str,
    layers: range | int | None,
    eos: frozenset[int],
    shard: Shard,
    embedding: bool = True,
    head: bool = True,
) -> Model:
    check_runnable(spec)
    own = layers if isinstance(layers, range) else range(spec.layers if layers is None else layers)
    if not 0 <= own.start < own.stop <= spec.layers:
        raise InputError(
            f"Model '{spec.name}' has layers[0:{spec.layers}]: a stage can't hold layers[{own.start}:{own.stop}]."
        )
    family = FAMILIES[spec.architecture]
    family.check_config(config, spec.name)
    made, ends = family.build(spec, config, weights, own, shard, embedding, head)
    return Model(spec, dtype, tuple(made), ends, eos, shard, head)


def _eos(directory: Path, config: dict[str, Any]) -> frozenset[int]:
    """End-of-text tokens: generation_config.json's where it has any (as `generate` does), else the config's."""
    path = directory / "generation_config.json"
    value = None
    if path.is_file():
        try:
            value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (UnicodeDecodeError, json.JSONDecodeError, AttributeError) as error:
            raise InputError(f"'{path}' is not valid JSON: {error}.") from None
    if value is None:
        value = config.get("eos_token_id")
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(v, int) for v in values):
        raise InputError(f"eos_token_id of the model in '{directory}' is {value!r}: it must be an integer or a list.")
    return frozenset(values)
