"""What one iteration costs on one pipeline stage (spec section 5), from a Profile's tables.

Stage time = Σ over its layers of attention by shape + the rest by tokens, + the embedding on the first stage and the
head on the last, + the engine's overhead. All methods take scalars or arrays that broadcast.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri

from exegpt.profile import DegreeTables, Profile, Table
from exegpt.schedule import Schedule, Stage
from exegpt.workload import LengthDistribution

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Chunks:
    """Prompts, or pieces of them, that one iteration encodes; arrays [n] in tokens."""

    tokens: Array
    past: Array
    """Tokens of each prompt that are already in the cache."""
    completed: int
    """How many prompts end here and give their first token."""


@dataclass(frozen=True)
class StageCost:
    """Seconds of iterations on one stage of `layers` decoder layers."""

    tables: DegreeTables
    layers: int
    overhead: Table
    first: bool = True
    last: bool = True
    extrapolated: set[str] = field(default_factory=set)
    """Tables that were asked outside their grid so far."""

    def _ask(self, name: str, table: Table, *at: ArrayLike) -> Array:
        if name not in self.extrapolated and not table.covers(*at):
            self.extrapolated.add(name)
        seconds: Array = table(*at)
        return seconds

    def _common(self, tokens: ArrayLike, rows: ArrayLike, sequences: ArrayLike) -> Array:
        """Everything but attention, for `tokens` tokens of `sequences` sequences, `rows` of which get a token."""
        seconds: Array = self.layers * self._ask("rest", self.tables.decoder.rest, tokens)
        if self.first:
            seconds = seconds + self._ask("embedding", self.tables.embedding, tokens)
        if self.last:
            seconds = seconds + self._ask("head", self.tables.head, np.maximum(rows, 1.0)) * (np.asarray(rows) > 0)
        seconds = seconds + self.overhead(sequences)
        return seconds

    def encode(self, batch: ArrayLike, law: LengthDistribution) -> Array:
        """Expected seconds to encode `batch` whole prompts with lengths of this law."""
        n = np.asarray(batch, dtype=np.float64)
        tokens, p = token_totals(n, law)
        each = n[..., None]
        return self._common(tokens, each, each) @ p + self.encode_attention(n, law)

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
        each = self._ask("encode_attention", self.tables.decoder.encode_attention, np.asarray(batch)[..., None], s)
        return self.layers * (each @ p)

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
        attention = self._ask("encode_attention", self.tables.decoder.encode_attention, batch, length)
        return self._common(np.multiply(batch, length), batch, batch) + self.layers * attention

    def decode(self, batch: ArrayLike, context: ArrayLike) -> Array:
        """Seconds of one decoding iteration of `batch` sequences (at least one) with this mean context, the token being
        decoded included.
        """
        whole = np.maximum(batch, 1.0)
        return self._common(whole, whole, whole) + self.decode_attention(whole, context)

    def decode_attention(self, batch: ArrayLike, context: ArrayLike) -> Array:
        """Seconds of decoding attention in all layers."""
        return self.layers * self._ask("decode_attention", self.tables.decoder.decode_attention, batch, context)

    def mixed(self, prompt_tokens: ArrayLike, prompts: ArrayLike, decoding: ArrayLike, context: ArrayLike) -> Array:
        """Seconds of an iteration on `prompt_tokens` tokens of `prompts` prompts beside `decoding` sequences, but for
        the prompts' attention.
        """
        rows = np.add(prompts, decoding)
        seconds = self._common(np.add(prompt_tokens, decoding), rows, rows)
        some = np.asarray(decoding) > 0
        return seconds + some * self.decode_attention(np.maximum(decoding, 1.0), context)

    def step(self, chunks: Chunks | None, decoding: int, context: float) -> float:
        """Seconds of one concrete iteration: ragged prompts or pieces of them, beside `decoding` sequences."""
        tokens, rows, sequences, seconds = decoding, decoding, decoding, 0.0
        if chunks is not None:
            tokens += int(chunks.tokens.sum())
            rows += chunks.completed
            sequences += len(chunks.tokens)
            seconds += self.layers * self._ragged(chunks)
        if decoding:
            seconds += float(self.decode_attention(decoding, context))
        return seconds + float(self._common(tokens, rows, sequences))

    def _ragged(self, chunks: Chunks) -> float:
        """One layer's attention for prompts of unequal lengths: the mean of what batches of each length would take."""
        whole = chunks.past == 0
        seconds = 0.0
        if whole.any():
            lengths = chunks.tokens[whole]
            table = self.tables.decoder.encode_attention
            seconds += float(self._ask("encode_attention", table, float(len(lengths)), lengths).mean())
        if not whole.all():
            table, pieces = self.tables.decoder.chunk_attention, ~whole
            seconds += float(self._ask("chunk_attention", table, chunks.tokens[pieces], chunks.past[pieces]).sum())
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


def stage_cost(profile: Profile, stage: Stage, stages: int, place: int, extrapolated: set[str]) -> StageCost:
    """The cost of the `place`-th of `stages` stages. `extrapolated` collects the tables asked outside their grid."""
    start, stop = stage.decoder_layers or (0, 0)
    tables = profile.degree(stage.tp)
    return StageCost(tables, stop - start, profile.overhead, place == 0, place == stages - 1, extrapolated)


def stage_costs(schedule: Schedule, profile: Profile) -> tuple[StageCost, ...]:
    """The costs of a schedule's stages, in order. They share one record of what was extrapolated."""
    asked: set[str] = set()
    count = len(schedule.stages)
    return tuple(stage_cost(profile, stage, count, i, asked) for i, stage in enumerate(schedule.stages))
