"""Reuse distance: the bytes that a run reads between two uses of a part of a model. It decides what caches still hold.

A part that is called in a loop, as by a profiler, finds its weights in a CPU's large shared cache. In a run, other
weights have been read since: without that, layers came out 5 to 20 % too fast. A distance that is too long makes them
too slow: by 10 % for decoding one sequence, whose iteration reads little but the weights. So before each timed call as
much other memory is read as in a run.
"""

from collections.abc import Callable

import torch

from xcore.specs.model import BYTES
from xrunner.models import Model

_MOST_BYTES = 2**27
"""Longest distance for one model: longer distances changed nothing measurable."""
_CACHED_TOKENS = 256
"""Cached tokens of each sequence, while layers are timed by tokens alone."""


class Reuse:
    """The calls before the timed calls of a model's parts.

    On a GPU these calls do nothing, because each timing flushes the caches.
    """

    def __init__(self, model: Model):
        spec, tp, width = model.spec, model.shard.of, BYTES[model.dtype]
        self._memory = torch.ones(_MOST_BYTES // 4) if model.device.type == "cpu" else None
        self._encoder = spec.encoder_layers * spec.layer_bytes(tp, model.dtype, encoder=True)
        self._layers = spec.layers * spec.layer_bytes(tp, model.dtype) + self._encoder
        self._head = float(spec.vocab * spec.hidden * width)
        self._cached = float(_CACHED_TOKENS * spec.layers * spec.kv_bytes(tp, model.kv_dtype))

    def layers(self, tokens: int) -> Callable[[], object]:
        """Return the call before a pass over all layers on `tokens` tokens.

        It reads as much as the head, the other stack of an encoder-decoder, and the keys and values of as many
        sequences as tokens.
        """
        return self._reading(self._head + self._encoder + tokens * self._cached)

    def ends(self, tokens: int) -> Callable[[], object]:
        """Return the call before the embedding or the head.

        It reads as much as the layers' weights, keys and values.
        """
        return self._reading(self._layers + tokens * self._cached)

    def attention(self) -> Callable[[], object]:
        """Return the call before one layer's attention.

        It reads as much as all weights, which a run reads between two uses of the same layer's attention.
        """
        return self._reading(self._layers + self._head)

    def others(self, size: int) -> Callable[[], object]:
        """Return the call before an iteration that follows those of other models with `size` bytes of weights."""
        return torch.ones(size // 4).sum

    def _reading(self, size: float) -> Callable[[], object]:
        memory = self._memory
        return (lambda: None) if memory is None else memory[: int(min(size, _MOST_BYTES)) // 4].sum
