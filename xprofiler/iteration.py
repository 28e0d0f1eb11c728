"""The parts of a model, each timed at its place in a run's iterations.

A part that is called in a loop finds its weights, or its keys and values, in a CPU's shared cache, and the other
threads asleep. On a CPU with 480 MB of cache, layers came out 5 to 15 % too fast, the head 10 to 30 % too fast, and
attention 10 to 35 % too slow. So the parts are called in the order of a run, and only one of them is timed.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from xcore.specs.schedule import BLOCK_SIZE
from xprofiler.attention_probe import AttentionProbe
from xprofiler.passes import decoding_attention, head_pass, in_a_row, layer_calls
from xprofiler.timing import Untimed
from xrunner.models import EncoderDecoder, Model
from xrunner.models.device import free_memory

_SEQUENCES = 64
"""Most sequences of the parts that aren't timed."""
_CONTEXT = 264
"""Tokens of each: 16 blocks and a half, as one of a profile's points."""


def _nothing() -> None:
    """Compute nothing."""


@dataclass(frozen=True)
class Part:
    """A part of an iteration: what `timed` gets."""

    call: Callable[[], object]
    before: Callable[[], object] = _nothing
    """The other parts before it."""
    untimed: Untimed | None = None
    """The other part that `call` contains."""


class Iteration:
    """The iterations of a model, of which one part is timed.

    On a GPU each part is called by itself, because its caches are flushed before. `probe`: its attention; None: a new
    one, of 64 sequences with 264 tokens where there is memory for them. `most`: layers of an iteration; None: all.
    """

    def __init__(self, model: Model, probe: AttentionProbe | None = None, most: int | None = None):
        self._model, self._most = model, most
        self._alone = model.device.type != "cpu"
        self.context = min(_CONTEXT, model.spec.longest_request or _CONTEXT)
        if probe is None and model.layers and not self._alone:
            each = -(-self.context // BLOCK_SIZE) * BLOCK_SIZE * model.share.kv_bytes(1, model.kv_dtype)
            sequences = max(1, min(_SEQUENCES, int(free_memory(model.device) / 8 / each)))
            sizes = sequences, self.context
            probe = AttentionProbe(model.share, *sizes, model.dtype, model.device, model.attention, model.kv_dtype)
        self.context = min(self.context, probe.length) if probe else self.context
        self._probe = probe

    def _few(self, tokens: int) -> int:
        """Return the number of sequences of the parts that aren't timed, in an iteration on `tokens` tokens."""
        return min(tokens, _SEQUENCES, self._probe.batch if self._probe else tokens)

    def layers(self, tokens: int, encoder: bool = False) -> Part:
        """Return the layers without attention, on `tokens` tokens; attention and the head take their turns.

        Ranks of a tensor-parallel group leave out the head, which only one of them has: the others would wait for it.
        """
        if self._alone:
            return Part(in_a_row(layer_calls(self._model, tokens, encoder)[: self._most]))
        attention = Untimed(self._attention(tokens, encoder))
        calls = layer_calls(self._model, tokens, encoder, attention)[: self._most]
        has_head = self._model.head and self._model.shard.of == 1
        head = head_pass(self._model, self._few(tokens)) if has_head else _nothing
        return Part(in_a_row(calls), head, attention)

    def end(self, call: Callable[[], object], tokens: int) -> Part:
        """Return a call before or after all layers, in an iteration on `tokens` tokens."""
        if self._alone or not self._model.layers:
            return Part(call)
        tokens = self._few(tokens)
        layers = layer_calls(self._model, tokens, between=self._attention(tokens))
        return Part(call, in_a_row(layers[: self._most]))

    def head(self, rows: int) -> Part:
        """Return the head and greedy sampling on `rows` rows; without a head, the layers before it alone.

        All ranks of a tensor-parallel group call it, because its layers sum over them.
        """
        return self.end(head_pass(self._model, rows) if self._model.head else _nothing, rows)

    def decoding(self, sequences: int) -> Part:
        """Return one layer's attention of decoding sequences, of 264 tokens each or of the model's context."""
        return self.attention(self._attention(sequences), sequences)

    def attention(self, call: Callable[[], object], tokens: int) -> Part:
        """Return one layer's attention; before it, another layer computes the rest, on `tokens` tokens."""
        if self._alone:
            return Part(call)
        layers = itertools.cycle(layer_calls(self._model, self._few(tokens)))
        return Part(call, lambda: next(layers)())

    def _attention(self, tokens: int, encoder: bool = False) -> Callable[[], object]:
        """Return a call of one layer's attention: of a prompt for encoders, else for a token of each sequence."""
        assert self._probe, "a model with layers has a probe"
        if encoder and isinstance(self._model, EncoderDecoder):
            bias = self._model.encoder_bias
            return self._probe.call(1, min(tokens, self.context), 0, causal=False, scale=1.0, bias=bias)
        return decoding_attention(self._model, self._probe, self._few(tokens), self.context)
