"""What one iteration costs on one pipeline stage (spec section 5), from a Profile's tables.

Stage time = Σ over its layers of attention by shape + the rest by tokens, + the embedding on the first stage and the
head on the last, + the engine's overhead. All methods take scalars or arrays that broadcast. In an encoder-decoder,
prompts go through the encoder's layers, and every decoder layer makes its keys and values of the encoded input once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri

from exegpt.profile import DegreeTables, Profile, Table
from exegpt.schedule import Stage
from exegpt.workload import LengthDistribution
from xsimulator.iteration_attention import iteration_attention

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Chunks:
    """Prompts, or pieces of them, that one iteration encodes; lists of as many tokens each."""

    tokens: Sequence[float]
    past: Sequence[float]
    """Tokens of each prompt that are already in the cache."""
    completed: int
    """How many prompts end here and give their first token."""


@dataclass(frozen=True)
class StageCost:
    """Seconds of iterations on one stage of `layers` decoder layers and `encoder_layers` encoder layers."""

    tables: DegreeTables
    layers: int
    overhead: Table
    first: bool = True
    last: bool = True
    extrapolated: set[str] = field(default_factory=set, compare=False)
    """Tables that were asked outside their grid so far."""
    encoder_layers: int = 0

    @property
    def encoder_decoder(self) -> bool:
        """Whether prompts and output tokens go through different layers."""
        return self.tables.encoder is not None

    def _ask(self, name: str, table: Table, *at: ArrayLike) -> Array:
        if name not in self.extrapolated and not table.covers(*at):
            self.extrapolated.add(name)
        seconds: Array = table(*at)
        return seconds

    def _products(self, prompt_tokens: ArrayLike, decoding: ArrayLike) -> Array:
        """All layers but for attention, for tokens of prompts and of `decoding` sequences."""
        if self.tables.encoder is None:
            seconds: Array = self.layers * self._ask("rest", self.tables.decoder.rest, np.add(prompt_tokens, decoding))
            return seconds
        some, others = np.asarray(prompt_tokens) > 0, np.asarray(decoding) > 0
        encoding = self.encoder_layers * self._ask("encoder rest", self.tables.encoder.rest, prompt_tokens)
        encoding = encoding + self.handover(prompt_tokens)
        both: Array = encoding * some + self.layers * self._ask("rest", self.tables.decoder.rest, decoding) * others
        return both

    def handover(self, tokens: ArrayLike) -> Array:
        """Seconds in which an encoder-decoder's decoder layers make keys and values of `tokens` encoded tokens."""
        if self.tables.decoder.cross_projection is None:
            return np.zeros(np.shape(tokens))
        seconds: Array = self.layers * self._ask("cross_projection", self.tables.decoder.cross_projection, tokens)
        return seconds

    def _common(self, prompt_tokens: ArrayLike, decoding: ArrayLike, prompts: ArrayLike) -> Array:
        """Everything but attention: `prompt_tokens` tokens of prompts, of which `prompts` end here, beside `decoding`
        sequences.
        """
        sequences = np.add(prompts, decoding)
        seconds: Array = self._products(prompt_tokens, decoding)
        if self.first:
            seconds = seconds + self._ask("embedding", self.tables.embedding, np.add(prompt_tokens, decoding))
        rows = np.asarray(decoding if self.encoder_decoder else sequences)  # an encoder gives no token
        if self.last and rows.any():
            seconds = seconds + self._ask("head", self.tables.head, np.maximum(rows, 1.0)) * (rows > 0)
        seconds = seconds + self.overhead(sequences)
        return seconds

    def encode(self, batch: ArrayLike, law: LengthDistribution) -> Array:
        """Expected seconds to encode `batch` whole prompts with lengths of this law."""
        n = np.asarray(batch, dtype=np.float64)
        tokens, p = token_totals(n, law)
        each = n[..., None]
        return self._common(tokens, 0.0, each) @ p + self.encode_attention(n, law)

    def encode_parts(self, batch: float, law: LengthDistribution, parts: int) -> Array:
        """Expected seconds to encode `parts` micro-batches of `batch` prompts each, shortest first, [parts].

        The longest of them holds up a pipeline: they lie at the quantiles of their total's normal law.
        """
        expected = self.encode(batch, law)
        if parts == 1:
            return expected[None]
        at = ndtri((np.arange(parts) + 0.5) / parts)
        seconds = self.encode_fixed(batch, np.maximum(law.mean + at * law.std / batch**0.5, law.s[0]))
        scaled: Array = seconds * (expected / seconds.mean())
        return scaled

    def encode_attention(self, batch: ArrayLike, law: LengthDistribution) -> Array:
        """Expected seconds of attention, in all layers, for `batch` whole prompts with lengths of this law."""
        s, p = _thinned(law)
        seconds: Array = self._prompt_attention(np.asarray(batch)[..., None], s) @ p
        return seconds

    def _prompt_attention(self, batch: ArrayLike, length: ArrayLike) -> Array:
        """Seconds of attention, in all layers, for `batch` whole prompts of one length."""
        layer, count = self.tables.decoder, self.layers
        if self.tables.encoder is not None:
            layer, count = self.tables.encoder, self.encoder_layers
        return count * self._ask("encode_attention", layer.encode_attention, batch, length)

    def encode_variance(self, batch: ArrayLike, law: LengthDistribution) -> Array:
        """Variance in s² of the time to encode `batch` prompts: their lengths' sum varies."""
        at = np.asarray(batch, dtype=np.float64)
        slope = (self.encode_fixed(at, law.mean * 1.05) - self.encode_fixed(at, law.mean * 0.95)) / (
            0.1 * law.mean * at
        )
        variance: Array = slope**2 * at * law.std**2
        return variance

    def encode_fixed(self, batch: ArrayLike, length: ArrayLike) -> Array:
        """Seconds to encode `batch` prompts of one length."""
        return self._common(np.multiply(batch, length), 0.0, batch) + self._prompt_attention(batch, length)

    def decode(self, batch: ArrayLike, context: ArrayLike) -> Array:
        """Seconds of one decoding iteration of `batch` sequences (at least one) with this mean context, the token being
        decoded included.
        """
        whole = np.maximum(batch, 1.0)
        return self._common(0.0, whole, 0.0) + self.decode_attention(whole, context)

    def decode_attention(self, batch: ArrayLike, context: ArrayLike) -> Array:
        """Seconds of decoding attention in all layers."""
        return self.layers * self._ask("decode_attention", self.tables.decoder.decode_attention, batch, context)

    def mixed(self, prompt_tokens: ArrayLike, prompts: ArrayLike, decoding: ArrayLike, context: ArrayLike) -> Array:
        """Seconds of an iteration on `prompt_tokens` tokens of `prompts` prompts beside `decoding` sequences, but for
        the prompts' attention.
        """
        seconds = self._common(prompt_tokens, decoding, prompts)
        some = np.asarray(decoding) > 0
        return seconds + some * self.decode_attention(np.maximum(decoding, 1.0), context)

    def step(self, chunks: Chunks | None, decoding: int, context: float) -> float:
        """Seconds of one concrete iteration: ragged prompts or pieces of them, beside `decoding` sequences."""
        tokens, past, completed = (chunks.tokens, chunks.past, chunks.completed) if chunks else ((), (), 0)
        new = sum(tokens)
        rows = decoding if self.encoder_decoder else decoding + completed  # an encoder gives no token
        seconds = self._concrete_layers(tokens, past, new, decoding, context)
        if self.first:
            seconds += self.tables.embedding.at(new + decoding)
        if self.last and rows:
            seconds += self.tables.head.at(rows)
        return seconds + self.overhead.at(decoding + len(tokens))

    def _concrete_layers(
        self, tokens: Sequence[float], past: Sequence[float], new: float, decoding: int, context: float
    ) -> float:
        encoder, decoder = self.tables.encoder, self.tables.decoder
        if encoder is None:
            attention = iteration_attention(decoder, tokens, past, decoding, context)
            return self.layers * (decoder.rest.at(new + decoding) + attention)
        seconds = 0.0
        if tokens:
            seconds += self.encoder_layers * (encoder.rest.at(new) + iteration_attention(encoder, tokens, past, 0, 0.0))
            if decoder.cross_projection is not None:
                seconds += self.layers * decoder.cross_projection.at(new)
        if decoding:
            attention = iteration_attention(decoder, (), (), decoding, context)
            seconds += self.layers * (decoder.rest.at(decoding) + attention)
        return seconds


def token_totals(batch: ArrayLike, law: LengthDistribution) -> tuple[Array, Array]:
    """Tokens of `batch` prompts together: values [..., k] and their probabilities [k].

    The law itself for one prompt, and for more the same shape with the sum's mean and deviation: a stage's time bends
    where computing takes over from reading the weights, so its mean is not the time at the mean.
    """
    n = np.asarray(batch, dtype=np.float64)[..., None]
    s, p = _thinned(law, 24)
    return n * law.mean + np.sqrt(n) * (s - law.mean), p


def _thinned(law: LengthDistribution, most: int = 64) -> tuple[Array, Array]:
    """The law on at most `most` lengths: neighbours merged at their mean."""
    s: Array = law.s
    p: Array = law.p
    if len(s) <= most:
        return s, p
    starts = np.arange(most) * len(s) // most
    weight = np.add.reduceat(p, starts)
    kept = weight > 0
    return (np.add.reduceat(p * s, starts)[kept] / weight[kept]), weight[kept]


def stage_costs(stages: Sequence[Stage], profile: Profile, extrapolated: set[str]) -> tuple[StageCost, ...]:
    """The costs of the stages that one phase runs through, in order. `extrapolated` collects the tables that are asked
    outside their grid; equal stages have one and the same cost.
    """
    made: dict[tuple[int, int, int, bool, bool], StageCost] = {}
    costs = []
    for place, stage in enumerate(stages):
        (start, stop), (encoder_start, encoder_stop) = stage.decoder_layers or (0, 0), stage.encoder_layers or (0, 0)
        first, last = place == 0, place == len(stages) - 1
        kind = (stage.tp, stop - start, encoder_stop - encoder_start, first, last)
        if kind not in made:
            tables, count = profile.degree(stage.tp), stop - start
            made[kind] = StageCost(tables, count, profile.overhead, first, last, extrapolated, kind[2])
        costs.append(made[kind])
    return tuple(costs)
