"""Seconds of one layer's attention, the mean over the layers: with heads of their own keys, and latent."""

from dataclasses import dataclass
from functools import cached_property

from xcore.specs.model import BYTES, ModelSpec
from xprofiler.roofline_device import RooflineDevice

_QKV_PASSES = 5
"""How often attention over prompts moves queries, keys and values: to rotate them, to write the cache, to read them."""


@dataclass(frozen=True)
class AttentionRoofline:
    """Attention of a model's layer on one of `tp` devices."""

    model: ModelSpec
    device: RooflineDevice
    tp: int
    encoder: bool = False

    @cached_property
    def _heads(self) -> int:
        return self.model.heads // self.tp

    @cached_property
    def _kv_heads(self) -> int:
        return 1 if self.model.latent else -(-self.model.kv_heads // self.tp)

    @cached_property
    def _cached_bytes(self) -> float:
        """Return the bytes of a cached token that a decoding token reads."""
        model = self.model
        if model.latent:
            return model.latent.cached * BYTES[self.device.kv_dtype]
        return float(self._kv_heads * model.head_kv_bytes(self.device.kv_dtype))

    def _seen(self, new: float, past: float) -> float:
        """Return the sum of tokens that each of `new` tokens sees: all of them without a causal mask."""
        return new * new if self.encoder else self.model.seen(new, past)

    def prompts(self, batch: float, new: float, past: float = 0.0) -> float:
        """Return seconds for `batch` prompts of `new` tokens, each after `past` cached ones."""
        model, device = self.model, self.device
        read = model.read(past)
        if model.latent:
            pair, passed = model.latent.prompt_pair, self._heads * 2 * model.latent.prompt_pair
            expanded = batch * read * model.latent.expansion
        else:
            pair, passed = 2 * model.head_size, (self._heads + 2 * self._kv_heads) * model.head_size
            expanded = 0.0
        macs = self._heads * (batch * self._seen(new, past) * pair + expanded)
        moved = _QKV_PASSES * batch * new * passed * device.activation_bytes / device.bandwidth_bytes_s
        cached = batch * read * self._cached_bytes / device.decode_bytes_s
        scored = self._index(batch, new, past, expanded=True)
        return device.launches.prompts + moved + (2.0 * macs / device.attention_flops_s + cached) + scored

    def decoding(self, batch: float, context: float) -> float:
        """Return seconds for one token of each of `batch` sequences of `context` tokens, including the new one."""
        model, device, past = self.model, self.device, max(context - 1.0, 0.0)
        pair = model.latent.decode_pair if model.latent else 2 * model.head_size
        computed = 2.0 * batch * self._seen(1.0, past) * self._heads * pair / device.attention_flops_s
        read = batch * model.read(past) * self._cached_bytes / device.decode_bytes_s
        started = device.launches.decoding
        started += batch * self._kv_heads * device.decode_head_s(self._heads // self._kv_heads)
        return started + max(computed, read) + self._index(batch, 1.0, past)

    def _index(self, batch: float, new: float, past: float, expanded: bool = False) -> float:
        """Return seconds of sparse attention's scores, which are computed alike on every device."""
        latent = self.model.latent
        if latent is None or latent.index is None:
            return 0.0
        index, device = latent.index, self.device
        pairs = batch * (new * past + new * (new + 1) / 2)
        computed = 2.0 * pairs * index.heads * index.head_size / device.attention_flops_s
        read = batch * past * latent.index_bytes / device.decode_bytes_s
        return computed + read if expanded else max(computed, read)
