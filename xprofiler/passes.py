"""Calls of a model's parts on random input: its layers without attention, its attention, its embedding and its head."""

import functools
import itertools
from collections.abc import Callable, Sequence

import torch

from exegpt.kernels.kv_write import kv_write
from xcore.specs.schedule import BLOCK_SIZE
from xprofiler.attention_probe import AttentionProbe
from xrunner.models import EncoderDecoder, KVCache, Model, computed_rows
from xrunner.models.decoder import Layer
from xrunner.models.weights import torch_dtype

_DECODING = 128
"""Most tokens that are timed as one of each sequence."""
_CACHED_LAYERS = 2
"""Layers that have a cache of their own: the others write into these, in turn."""


def layer_calls(
    model: Model, tokens: int, encoder: bool = False, between: Callable[[], object] | None = None
) -> list[Callable[[], object]]:
    """Return a call of each layer without its attention kernel, on `tokens` tokens.

    These are the decoder layers or, with `encoder`, the encoder layers. `between` is called in the place of attention.
    """
    rows = computed_rows(tokens)
    x = _states(model, rows)
    _, positions = _ids(model, rows)
    cache, slots = _scattered(model, tokens)
    attended = torch.randn(rows, model.share.heads, model.share.head_size, dtype=x.dtype, device=model.device)
    layers: tuple[Layer, ...] = model.layers
    cross: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
    if isinstance(model, EncoderDecoder):
        layers, cross = (model.encoder, {}) if encoder else (model.layers, {"cross": lambda q: attended})

    def run(layer: Layer, keys: torch.Tensor, values: torch.Tensor) -> None:
        layer.before_attention(x, positions, keys, values, slots)
        if between:
            between()
        layer.after_attention(x, attended, **cross)

    caches = itertools.cycle(zip(cache.keys, cache.values, strict=True))
    return [functools.partial(run, layer, *cached) for layer, cached in zip(layers, caches, strict=False)]


def in_a_row(calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
    """Return a call of all `calls`."""

    def run() -> None:
        for call in calls:
            call()

    return run


def cross_projection_pass(model: Model, tokens: int) -> Callable[[], object]:
    """Return a call that computes all decoder layers' keys and values of `tokens` encoded tokens."""
    assert isinstance(model, EncoderDecoder), "a decoder-only model has none"
    encoded = _states(model, tokens)
    cache, slots = _scattered(model, tokens)

    def run() -> None:
        caches = itertools.cycle(zip(cache.keys, cache.values, strict=True))
        for layer, (keys, values) in zip(model.layers, caches, strict=False):
            kv_write(*layer.cross_keys_values(encoded), keys, values, slots)

    return run


def decoding_attention(model: Model, probe: AttentionProbe, batch: int, context: int) -> Callable[[], object]:
    """Return a call of one layer's attention for one new token of each of `batch` sequences of `context` tokens.

    In an encoder-decoder, half of the tokens belong to the input, which cross-attention reads.
    """
    if not isinstance(model, EncoderDecoder):
        return probe.call(batch, 1, context - 1)
    inputs, outputs = max(1, context // 2), context - context // 2
    cross = probe.call(batch, 1, inputs - 1, causal=False, scale=1.0)
    itself = probe.call(batch, 1, outputs - 1, scale=1.0, bias=model.decoder_bias)
    return lambda: (itself(), cross())


def _scattered(model: Model, tokens: int) -> tuple[KVCache, torch.Tensor]:
    """Return a cache that holds `tokens` tokens, and their slots in randomly ordered blocks.

    Up to 128 tokens are those of as many decoding sequences, each in a block of its own; more fill their blocks.
    """
    blocks = tokens if tokens <= _DECODING else -(-tokens // BLOCK_SIZE)
    slots = torch.randperm(blocks).unsqueeze(1) * BLOCK_SIZE + torch.arange(BLOCK_SIZE)
    slots = slots[:, -1] if tokens <= _DECODING else slots.flatten()[:tokens]
    layers = min(_CACHED_LAYERS, model.cached_layers)
    cache = KVCache.allocate(model.share, layers, blocks, BLOCK_SIZE, model.kv_dtype, model.device)
    return cache, slots.contiguous().to(model.device)


def _ids(model: Model, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random tokens and their positions."""
    ids, positions = torch.randint(model.spec.vocab, (tokens,)), torch.arange(tokens) % model.spec.context
    return ids.to(model.device), positions.to(model.device)


def _states(model: Model, rows: int) -> torch.Tensor:
    """Return random states [rows, hidden]."""
    return torch.randn(rows, model.spec.hidden, dtype=torch_dtype(model.dtype), device=model.device)


def embedding_pass(model: Model, tokens: int) -> Callable[[], object]:
    """Return a call of the embedding of `tokens` tokens."""
    ids, positions = _ids(model, tokens)
    return lambda: model.ends.embed(ids, positions)


def head_pass(model: Model, rows: int) -> Callable[[], object]:
    """Return a call of the final norm, the head and greedy sampling, on `rows` rows."""
    x = _states(model, rows)
    return lambda: model.sample(x)
