"""Times of iterations on one tensor-parallel group, by the parts of a model that a stage may hold (docs/theory.md).

A stage's time is the sum over its layers, the embedding, the head, and the engine's overhead. Here each part is looked
up in the Profile once for all stages; `stage.py` adds them up. All methods take scalars or arrays that broadcast. In an
encoder-decoder, prompts go through the encoder's layers, and every decoder layer computes keys and values from the
encoded input once.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from exegpt.profile import DegreeTables, LayerTables, Table
from exegpt.workload import LengthDistribution
from xsimulator.cost.normal import even_normal

Array = NDArray[np.float64]


@dataclass(frozen=True)
class PartSeconds:
    """Seconds of an iteration on each part of a model; arrays of one shape, or scalars."""

    layer: Any
    """One decoder layer."""
    encoder_layer: Any
    """One encoder layer."""
    embedding: Any
    head: Any
    engine: Any
    """The engine's overhead, on every stage."""


@dataclass(eq=False)
class Group:
    """The devices of one tensor-parallel group."""

    tables: DegreeTables
    overhead: Table
    watched: bool = True
    """Whether to record the tables that are queried outside their grid."""
    extrapolated: set[str] = field(default_factory=set)
    """Their names so far."""
    _known: dict[object, Any] = field(default_factory=dict)

    def _look_up(self, name: str, table: Table, *at: ArrayLike) -> Array:
        if self.watched and name not in self.extrapolated and not table.covers(*at):
            self.extrapolated.add(name)
        seconds: Array = table(*at)
        return seconds

    def part_seconds(
        self, prompt_tokens: ArrayLike, prompts: ArrayLike, decoding: ArrayLike, attention: tuple[Any, Any]
    ) -> PartSeconds:
        """An iteration on `prompt_tokens` tokens of `prompts` prompts that end here, beside `decoding` sequences.

        `attention` are the seconds of one layer's attention for the prompts and for the decoding sequences.
        """
        sequences = np.add(prompts, decoding)
        tables, rows = self.tables, np.asarray(sequences if self.tables.encoder is None else decoding)
        layer, encoder_layer = self._layers(prompt_tokens, decoding, attention)
        head: Any = 0.0
        if rows.any():
            head = self._look_up("head", tables.head, np.maximum(rows, 1.0)) * (rows > 0)
        embedding = self._look_up("embedding", tables.embedding, np.add(prompt_tokens, decoding))
        return PartSeconds(layer, encoder_layer, embedding, head, self.overhead(sequences))

    def _layers(self, prompt_tokens: ArrayLike, decoding: ArrayLike, attention: tuple[Any, Any]) -> tuple[Any, Any]:
        """One decoder layer and one encoder layer."""
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
        """One decoder layer's keys and values of `tokens` encoded tokens; zero in a decoder-only model."""
        table = self.tables.decoder.cross_projection
        return np.zeros(np.shape(tokens)) if table is None else self._look_up("cross_projection", table, tokens)

    def _prompt_tables(self) -> LayerTables:
        return self.tables.encoder or self.tables.decoder

    def prompt_attention(self, batch: ArrayLike, distribution: LengthDistribution) -> Array:
        """Expected seconds of one layer's attention for `batch` whole prompts with lengths of this distribution."""
        s, p = self._thinned(distribution, 64)
        table = self._prompt_tables().encode_attention
        seconds: Array = self._look_up("encode_attention", table, np.asarray(batch)[..., None], s) @ p
        return seconds

    def encode(self, batch: ArrayLike, distribution: LengthDistribution) -> PartSeconds:
        """Expected seconds to encode `batch` whole prompts with lengths of this distribution; the batch's shape.

        Part times bend where computing takes over from reading the weights, so their mean is not the time at the mean:
        they are averaged over the distribution of the batch's tokens.
        """
        n = np.asarray(batch, dtype=np.float64)
        s, p = self._thinned(distribution, 24)
        each = n[..., None]
        seconds = self.part_seconds(
            each * distribution.mean + np.sqrt(each) * (s - distribution.mean), each, 0.0, (0.0, 0.0)
        )
        mean = PartSeconds(*(_expected(part, p) for part in vars(seconds).values()))
        return _with_attention(mean, self.tables.encoder is not None, self.prompt_attention(n, distribution))

    def encode_parts(self, batch: float, distribution: LengthDistribution, parts: int) -> PartSeconds:
        """Expected seconds to encode `parts` micro-batches of `batch` prompts each, shortest first, [parts].

        The longest of them holds up a pipeline: they lie at the quantiles of their total's normal distribution.
        """
        key = ("encode_parts", batch, parts, id(distribution))
        if key not in self._known:
            self._known[key] = self._encode_parts(batch, distribution, parts)
        return self._known[key]  # type: ignore[no-any-return]

    def _encode_parts(self, batch: float, distribution: LengthDistribution, parts: int) -> PartSeconds:
        expected = self.encode(batch, distribution)
        at = even_normal(parts)
        spread = self.encode_fixed(
            batch, np.maximum(distribution.mean + at * distribution.std / batch**0.5, distribution.s[0])
        )
        pairs = zip(vars(expected).values(), vars(spread).values(), strict=True)
        return PartSeconds(*(_scaled(part, float(np.asarray(mean)), parts) for mean, part in pairs))

    def encode_fixed(self, batch: ArrayLike, length: ArrayLike) -> PartSeconds:
        """Seconds to encode `batch` prompts of one length."""
        attention = self._look_up("encode_attention", self._prompt_tables().encode_attention, batch, length)
        return self.part_seconds(np.multiply(batch, length), batch, 0.0, (attention, 0.0))

    def decode(self, batch: ArrayLike, context: ArrayLike) -> PartSeconds:
        """Seconds of one decoding iteration of `batch` sequences (at least one) with this mean context, the token being
        decoded included.
        """
        sequences = np.maximum(batch, 1.0)
        return self.part_seconds(0.0, 0.0, sequences, (0.0, self._decode_attention(sequences, context)))

    @functools.cached_property
    def decode_parts(self) -> tuple[Array, Array, tuple[Array, Array, Array]]:
        """`decode` as tables: points of the batch, a layer's rest, the embedding, the head and the engine at each
        [points, 4], and a layer's attention by its points of batch and context.
        """
        layer = self.tables.decoder
        tables = (layer.rest, self.tables.embedding, self.tables.head, self.overhead)
        points = np.unique(np.concatenate([table.points[0] for table in tables]))
        parts = np.stack([np.broadcast_to(table(points), points.shape) for table in tables], axis=1)
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
        attention: ArrayLike = 0.0,
    ) -> PartSeconds:
        """Seconds of an iteration on `prompt_tokens` tokens of `prompts` prompts beside `decoding` sequences;
        `attention` is what the prompts' takes in one layer.
        """
        some = np.asarray(decoding) > 0
        decoded = some * self._decode_attention(np.maximum(decoding, 1.0), context)
        return self.part_seconds(prompt_tokens, prompts, decoding, (attention, decoded))

    def _thinned(self, distribution: LengthDistribution, most: int) -> tuple[Array, Array]:
        key = ("thinned", most, id(distribution))
        if key not in self._known:
            # The distribution is kept too, so that its id isn't reused.
            self._known[key] = (*thinned(distribution, most), distribution)
        s, p, _ = self._known[key]
        return s, p


def _expected(part: ArrayLike, p: Array) -> Array:
    """The mean over the last axis; unchanged without that axis."""
    values = np.asarray(part, dtype=np.float64)
    if not values.ndim:
        return values
    mean: Array = values[..., 0] if values.shape[-1] == 1 else values @ p
    return mean


def _scaled(part: ArrayLike, mean: float, parts: int) -> Array:
    """The micro-batches' seconds, scaled to the expected mean."""
    values = np.broadcast_to(np.asarray(part, dtype=np.float64), (parts,))
    mean_of_parts = float(values.mean())
    return values * (mean / mean_of_parts) if mean_of_parts else np.full(parts, mean)


def _with_attention(seconds: PartSeconds, encoder_decoder: bool, attention: Array) -> PartSeconds:
    layer, encoder_layer = np.asarray(seconds.layer), np.asarray(seconds.encoder_layer)
    if encoder_decoder:
        return PartSeconds(layer, encoder_layer + attention, seconds.embedding, seconds.head, seconds.engine)
    return PartSeconds(layer + attention, encoder_layer, seconds.embedding, seconds.head, seconds.engine)


def thinned(distribution: LengthDistribution, most: int) -> tuple[Array, Array]:
    """The distribution on at most `most` lengths: neighbours merged at their mean."""
    s: Array = distribution.s
    p: Array = distribution.p
    if len(s) <= most:
        return s, p
    starts = np.arange(most) * len(s) // most
    weight = np.add.reduceat(p, starts)
    kept = weight > 0
    return (np.add.reduceat(p * s, starts)[kept] / weight[kept]), weight[kept]


def token_totals(batch: ArrayLike, distribution: LengthDistribution) -> tuple[Array, Array]:
    """Tokens of `batch` prompts together: values [..., k] and their probabilities [k].

    The distribution itself for one prompt, and for more the same shape with the sum's mean and deviation.
    """
    n = np.asarray(batch, dtype=np.float64)[..., None]
    s, p = thinned(distribution, 24)
    return n * distribution.mean + np.sqrt(n) * (s - distribution.mean), p
