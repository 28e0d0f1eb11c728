"""EncoderDecoder: a model whose prompts are encoded whole and read by every decoding iteration through cross-attention.

A sequence has one table of blocks: its input's cross-attention keys and values lie in the first places, then those of
its own tokens. So it takes as much cache as a decoder-only model's, and both attentions are the same kernel's.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch

from exegpt.kernels.kv_write import kv_write
from exegpt.models.batch import AttentionBatch, Batch, attend
from exegpt.models.cache import KVCache
from exegpt.models.decoder import Model
from exegpt.models.t5 import T5Ends, T5Layer


@dataclass(frozen=True, kw_only=True)
class EncoderDecoder(Model):
    """An encoder-decoder. In its batches the prompts' part has no `starts`, the decoding one has."""

    layers: tuple[T5Layer, ...]
    encoder: tuple[T5Layer, ...]
    ends: T5Ends
    encoder_bias: torch.Tensor
    """float32 [heads, 2 · D + 1]; see `kernels/attention.py`"""
    decoder_bias: torch.Tensor

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache, x: torch.Tensor | None = None) -> torch.Tensor:
        """One iteration: caches what the prompts' cross-attention and the decoding tokens need, and returns the final
        states [rows, hidden] that need a token.
        """
        x = self.ends.embed(batch.tokens, batch.positions) if x is None else x
        prompts, decoding = batch.attention[0], batch.attention[-1]
        begin = prompts.end if prompts.starts is None else 0
        if begin:  # rows that only fill up are the last part's
            self._encode(x if decoding is prompts else x[:begin], prompts, batch.slots[:begin], cache)
        if decoding.starts is not None:
            part = replace(decoding, begin=0, end=decoding.end - begin)
            x = self._decode(x[begin:], part, batch.slots[begin:], cache)
        return x if batch.rows is None else x[batch.rows - begin]

    def _encode(self, x: torch.Tensor, part: AttentionBatch, slots: torch.Tensor, cache: KVCache) -> None:
        """Encode prompts x [rows, hidden], then cache their keys and values for every decoder layer's cross-attention.

        Until then their places in the first layer's cache hold the keys and values of the encoder layer at work.
        """
        keys, values = cache.keys[0], cache.values[0]
        for layer in self.encoder:
            q, k, v = layer.before_attention(x, slots)
            kv_write(k[: len(slots)], v[: len(slots)], keys, values, slots)
            attended = attend(q, keys, values, (part,), scale=1.0, causal=False, bias=self.encoder_bias)
            x = layer.after_attention(x, attended)
        encoded = self.ends.encoded(x[: len(slots)])
        for decoder, keys, values in zip(self.layers, cache.keys, cache.values, strict=True):
            kv_write(*decoder.cross_keys_values(encoded), keys, values, slots)

    def _decode(self, x: torch.Tensor, part: AttentionBatch, slots: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """One token x [rows, hidden] of every decoding sequence through the decoder: [rows, hidden]."""
        assert part.starts is not None
        inputs = (replace(part, contexts=part.starts, starts=None),)
        for layer, keys, values in zip(self.layers, cache.keys, cache.values, strict=True):
            q, k, v = layer.before_attention(x, slots)
            kv_write(k[: len(slots)], v[: len(slots)], keys, values, slots)
            attended = attend(q, keys, values, (part,), scale=1.0, bias=self.decoder_bias)
            cross = partial(attend, keys=keys, values=values, parts=inputs, scale=1.0, causal=False)
            x = layer.after_attention(x, attended, cross)
        return x
