"""Reuse distance: what a run reads between two visits of a part of a model, which decides what caches still hold.

A part that is called in a loop, as a profiler does, finds its weights in a CPU's large shared cache, where a run has
read others since: layers came out 5 to 20 % too fast. A distance that is too long makes them too slow: decoding one
sequence, whose iteration reads little but the weights, by 10 %. So before each timed call as much other memory is read
as a run would.
"""

from collections.abc import Callable

import torch

from xcore.specs.model import BYTES
from xrunner.models import Model

_MOST_BYTES = 2**27
"""Of one model: longer distances change nothing that was measurable."""
_CACHED_TOKENS = 256
"""Of each sequence, while layers are timed by tokens alone."""


class Reuse:
    """What to call before the timed calls of a model's parts; on a GPU nothing, since a timing flushes its caches."""

    def __init__(self, model: Model):
        spec, tp, width = model.spec, model.shard.of, BYTES[model.dtype]
        self._memory = torch.ones(_MOST_BYTES // 4) if model.device.type == "cpu" else None
        self._encoder = spec.encoder_layers * spec.layer_bytes(tp, model.dtype, encoder=True)
        self._layers = spec.layers * spec.layer_bytes(tp, model.dtype) + self._encoder
        self._head = float(spec.vocab * spec.hidden * width)
        self._cached = float(_CACHED_TOKENS * spec.layers * spec.kv_bytes(tp, model.dtype))

    def layers(self, tokens: int) -> Callable[[], object]:
        """Before a pass over all layers on `tokens` tokens: the head, the other stack of an encoder-decoder, and
        keys and values as though each token were another sequence's.
        """
        return self._reading(self._head + self._encoder + tokens * self._cached)

    def ends(self, tokens: int) -> Callable[[], object]:
        """Before the embedding or the head: the layers' weights, keys and values."""
        return self._reading(self._layers + tokens * self._cached)

    def attention(self) -> Callable[[], object]:
        """Before one layer's attention: all weights, since the same layer's of the iteration before."""
        return self._reading(self._layers + self._head)

    def others(self, size: int) -> Callable[[], object]:
        """Before an iteration that follows those of other models with so many bytes of weights."""
        return torch.ones(size // 4).sum

    def _reading(self, size: float) -> Callable[[], object]:
        memory = self._memory
        return (lambda: None) if memory is None else memory[: int(min(size, _MOST_BYTES)) // 4].sum
