"""EncoderDecoder: a model that encodes whole prompts and reads them in every decoding iteration by cross-attention.

A sequence has one block table: its input's cross-attention keys and values come first, then those of its own tokens. So
it needs as much cache as with a decoder-only model, and one kernel computes both attentions.

Each of several stages has layers of one stack or of both. Prompts go through the encoder layers of all stages; the last
encoder stage sends its output to every stage with decoder layers, which computes keys and values from it.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch

from exegpt.kernels.kv_write import kv_write
from xrunner.models.batch import AttentionBatch, Batch, attend
from xrunner.models.cache import KVCache
from xrunner.models.decoder import Between, Model
from xrunner.models.t5 import T5Ends, T5Layer


@dataclass(frozen=True, kw_only=True)
class EncoderDecoder(Model):
    """An encoder-decoder or a stage of one.

    In its batches, the decoding part has `starts`; the prompts' part has none.
    """

    layers: tuple[T5Layer, ...]
    encoder: tuple[T5Layer, ...]
    ends: T5Ends
    encoder_bias: torch.Tensor
    """float32 [heads, 2 · D + 1]; see `kernels/attention.py`"""
    decoder_bias: torch.Tensor

    @property
    def cached_layers(self) -> int:
        """Number of layers in its KV cache: decoder layers, and at least one, which encoder layers use in prefill."""
        return max(1, len(self.layers))

    @torch.inference_mode()
    def forward(
        self, batch: Batch, cache: KVCache, x: torch.Tensor | None = None, between: Between = lambda: None
    ) -> torch.Tensor:
        """Run one iteration, and return the states [rows, hidden] after its last layer.

        Caches what the prompts' cross-attention and the decoding tokens need. For prompts, the states after the
        encoder's last layer are the encoder's output. `between` as in `Model.forward`.
        """
        x = self.ends.embed(batch.tokens, batch.positions) if x is None else x
        prompts, decoding = batch.attention[0], batch.attention[-1]
        begin = prompts.end if prompts.starts is None else 0
        parts = []
        if begin:  # padding rows belong to the last part
            states = x if decoding is prompts else x[:begin]
            parts.append(self._encode(states, prompts, batch.slots[:begin], cache, between))
        if decoding.starts is not None:
            part = replace(decoding, begin=0, end=decoding.end - begin)
            parts.append(self._decode(x[begin:], part, batch.slots[begin:], cache, between))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @torch.inference_mode()
    def cache_encoded(self, encoded: torch.Tensor, slots: torch.Tensor, cache: KVCache) -> None:
        """Cache every decoder layer's cross-attention keys and values of the encoder's output [tokens, hidden].

        `slots`, int64 [tokens], are the places in the cache.
        """
        # Not strict: without a decoder layer the cache still has one layer.
        for decoder, keys, values in zip(self.layers, cache.keys, cache.values, strict=False):
            kv_write(*decoder.cross_keys_values(encoded), keys, values, slots)

    def _encode(
        self, x: torch.Tensor, part: AttentionBatch, slots: torch.Tensor, cache: KVCache, between: Between
    ) -> torch.Tensor:
        """Run prompts x [rows, hidden] through the encoder: [rows, hidden]; cache them after its last layer.

        Until then their slots in the first layer's cache hold the keys and values of the current encoder layer.
        """
        keys, values = cache.keys[0], cache.values[0]
        for layer in self.encoder:
            q = layer.before_attention(x, slots, keys, values, slots)
            attended = attend(q, keys, values, (part,), scale=1.0, causal=False, bias=self.encoder_bias)
            x = layer.after_attention(x, attended)
            between()
        if self.ends.encoder_norm is not None:
            x = self.ends.encoded(x)
            self.cache_encoded(x[: len(slots)], slots, cache)
        return x

    def _decode(
        self, x: torch.Tensor, part: AttentionBatch, slots: torch.Tensor, cache: KVCache, between: Between
    ) -> torch.Tensor:
        """Run one token x [rows, hidden] of every decoding sequence through the decoder: [rows, hidden]."""
        assert part.starts is not None
        inputs = (replace(part, contexts=part.starts, starts=None),)
        for layer, keys, values in zip(self.layers, cache.keys, cache.values, strict=True):
            q = layer.before_attention(x, slots, keys, values, slots)
            attended = attend(q, keys, values, (part,), scale=1.0, bias=self.decoder_bias)
            cross = partial(attend, keys=keys, values=values, parts=inputs, scale=1.0, causal=False)
            x = layer.after_attention(x, attended, cross)
            between()
        return x
