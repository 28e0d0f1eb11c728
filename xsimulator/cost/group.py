"""Times of iterations on one tensor-parallel group, by the parts of a model that a stage may hold (docs/theory.md).

A stage's time is the sum over its layers, the embedding, the head, and the engine's overhead. This module looks each
part up in the Profile once for all stages; `stage.py` adds them up. All methods take scalars or arrays that broadcast.
In an encoder-decoder, prompts go through the encoder's layers, and every decoder layer computes keys and values from
the encoded input once.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

import numpy as np
from numpy.typing import ArrayLike

from xcore.arrays import Array
from xcore.specs.profile import DegreeTables, LayerTables, Table

Seconds = Array | float
"""Seconds of an iteration, or of each of several."""


@dataclass(frozen=True)
class PartSeconds:
    """Seconds of an iteration on each part of a model; arrays of one shape, or scalars."""

    layer: Seconds
    """One decoder layer."""
    encoder_layer: Seconds
    """One encoder layer."""
    embedding: Seconds
    head: Seconds
    engine: Seconds
    """The engine's overhead, on every stage."""

    def map(self, seconds_of: Callable[[Seconds], Seconds]) -> "PartSeconds":
        """Apply `seconds_of` to each part."""
        return PartSeconds(**{name: seconds_of(getattr(self, name)) for name in PARTS})


PARTS = tuple(part.name for part in fields(PartSeconds))


@dataclass(eq=False)
class Group:
    """The devices of one tensor-parallel group."""

    tables: DegreeTables
    overhead: Table
    watched: bool = True
    """Whether to record the tables that are queried outside their grid."""
    extrapolated: set[str] = field(default_factory=set)
    """Names of the tables queried outside their grid so far."""
    rows: int = 1
    """Tokens that an iteration computes of each decoding sequence: with speculation, its draft tokens too."""

    @property
    def encoder_decoder(self) -> bool:
        """Return whether prompts and output tokens go through different layers."""
        return self.tables.encoder is not None

    def _look_up(self, name: str, table: Table, *at: ArrayLike) -> Array:
        if self.watched and name not in self.extrapolated and not table.covers(*at):
            self.extrapolated.add(name)
        return np.asarray(table(*at))

    def part_seconds(
        self,
        prompt_tokens: ArrayLike,
        prompts: ArrayLike,
        decoding: ArrayLike,
        attention: tuple[Seconds, Seconds],
        completed: ArrayLike | None = None,
    ) -> PartSeconds:
        """Return the seconds of an iteration on `prompt_tokens` tokens of `prompts` prompts or chunks.

        The iteration also decodes `decoding` sequences. `attention` is the seconds of one layer's attention, for the
        prompts and for the decoding sequences. `completed` prompts end in the iteration (None: all) and sample a token.
        """
        sequences, verified = np.add(prompts, decoding), np.multiply(self.rows, decoding)
        sampled = np.add(prompts if completed is None else completed, verified)
        tables, rows = self.tables, np.asarray(verified if self.encoder_decoder else sampled)
        layer, encoder_layer = self._layers(prompt_tokens, verified, attention)
        head: Seconds = 0.0
        if rows.any():
            head = self._look_up("head", tables.head, np.maximum(rows, 1.0)) * (rows > 0)
        embedding = self._look_up("embedding", tables.embedding, np.add(prompt_tokens, verified))
        return PartSeconds(layer, encoder_layer, embedding, head, self.overhead(sequences))

    def _layers(
        self, prompt_tokens: ArrayLike, decoding: ArrayLike, attention: tuple[Seconds, Seconds]
    ) -> tuple[Seconds, Seconds]:
        """Return the seconds of one decoder layer and of one encoder layer; `decoding` counts tokens."""
        decoder, encoder = self.tables.decoder, self.tables.encoder
        if encoder is None:
            rest = self._look_up("rest", decoder.rest, np.add(prompt_tokens, decoding))
            return rest + attention[0] + attention[1], 0.0
        any_prompt, any_decoding = np.asarray(prompt_tokens) > 0, np.asarray(decoding) > 0
        layer = self.cross_projection(prompt_tokens) * any_prompt
        if any_decoding.any():
            layer = layer + (self._look_up("rest", decoder.rest, decoding) + attention[1]) * any_decoding
        if not any_prompt.any():
            return layer, 0.0
        return layer, (self._look_up("encoder rest", encoder.rest, prompt_tokens) + attention[0]) * any_prompt

    def cross_projection(self, tokens: ArrayLike) -> Array:
        """Return one decoder layer's seconds for the keys and values of `tokens` encoded tokens; 0 if decoder-only."""
        table = self.tables.decoder.cross_projection
        return np.zeros(np.shape(tokens)) if table is None else self._look_up("cross_projection", table, tokens)

    def prompt_attention(self, batch: ArrayLike, length: ArrayLike) -> Array:
        """Return the seconds of one layer's attention for `batch` whole prompts of one length."""
        layer: LayerTables = self.tables.encoder or self.tables.decoder
        return self._look_up("encode_attention", layer.encode_attention, batch, length)

    def chunk_attention(self, tokens: ArrayLike, past: ArrayLike) -> Array:
        """Return the seconds of one layer's attention for chunks of `tokens` tokens after `past` cached tokens."""
        return self._look_up("chunk_attention", self.tables.decoder.chunk_attention, tokens, past)

    def with_attention(self, parts: PartSeconds, attention: ArrayLike) -> PartSeconds:
        """Add the seconds of one layer's attention for the prompts to the parts of an iteration."""
        name = "encoder_layer" if self.encoder_decoder else "layer"
        return replace(parts, **{name: getattr(parts, name) + attention})

    def encode_fixed(self, batch: ArrayLike, length: ArrayLike) -> PartSeconds:
        """Return the seconds to prefill `batch` prompts of one length."""
        attention = self.prompt_attention(batch, length)
        return self.part_seconds(np.multiply(batch, length), batch, 0.0, (attention, 0.0))

    def decode(self, batch: ArrayLike, context: ArrayLike) -> PartSeconds:
        """Return the seconds of one decode step of `batch` sequences (at least one).

        `context` is their mean context, including the token being decoded.
        """
        sequences = np.maximum(batch, 1.0)
        return self.part_seconds(0.0, 0.0, sequences, (0.0, self._decode_attention(sequences, context)))

    @functools.cached_property
    def decode_parts(self) -> tuple[Array, Array, tuple[Array, Array, Array]]:
        """Return `decode` as tables.

        Returns:
            The points of the batch; the seconds of a layer's rest, the embedding, the head and the engine at each,
            [points, 4]; and a layer's attention: its points of batch, its points of context, and the seconds at both.
        """
        layer = self.tables.decoder
        tables = (layer.rest, self.tables.embedding, self.tables.head, self.overhead)
        rows = (self.rows, self.rows, self.rows, 1)
        places = [np.array(table.points[0]) / n for table, n in zip(tables, rows, strict=True)]
        points = np.unique(np.concatenate(places))
        seconds = (table(points * n) for table, n in zip(tables, rows, strict=True))
        parts = np.stack([np.broadcast_to(part, points.shape) for part in seconds], axis=1)
        batches, contexts = (np.array(p, dtype=np.float64) for p in layer.decode_attention.points)
        attention = np.array(layer.decode_attention.values).reshape(len(batches), len(contexts))
        return points, parts, (batches, contexts, attention)

    def _decode_attention(self, batch: ArrayLike, context: ArrayLike) -> Array:
        return self._look_up("decode_attention", self.tables.decoder.decode_attention, batch, context)

    def mixed(
        self,
        prompt_tokens: ArrayLike,
        prompts: ArrayLike,
        decoding: ArrayLike,
        context: ArrayLike,
        attention: Seconds = 0.0,
        completed: ArrayLike | None = None,
    ) -> PartSeconds:
        """Return the seconds of an iteration on `prompt_tokens` tokens of `prompts` prompts or chunks.

        The iteration also decodes `decoding` sequences with the mean context `context`. `attention` is the seconds of
        the prompts' attention in one layer. `completed` has the same meaning as in `part_seconds`.
        """
        some = np.asarray(decoding) > 0
        decoded = some * self._decode_attention(np.maximum(decoding, 1.0), context)
        return self.part_seconds(prompt_tokens, prompts, decoding, (attention, decoded), completed)
