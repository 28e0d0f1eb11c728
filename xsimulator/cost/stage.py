"""Times of one iteration on one pipeline stage (docs/theory.md): its share of a group's parts.

Stage time = Σ over its layers of attention by shape + the rest by tokens, + the embedding on the first stage and the
head on the last, + the engine's overhead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from xcore.arrays import Array
from xcore.specs.profile import DegreeTables, LayerTables, Table
from xcore.specs.schedule import Stage
from xsimulator.cost.group import Group, PartSeconds


def iteration_attention(
    tables: LayerTables, tokens: Sequence[float], past: Sequence[float], decoding: int, context: float
) -> float:
    """Return the seconds of one layer's attention in an iteration.

    Prompt (or chunk) i has `tokens[i]` new tokens and `past[i]` tokens in the cache. `decoding` sequences have a mean
    context of `context` tokens, including the new one.

    If the profile measured prompts and decoding in one kernel, the longest chunk shares it with the decoding sequences.
    Every other chunk adds its time alone. Otherwise every phase has its own kernel. Whole prompts then cost the mean
    over their lengths of a batch of that length; chunks and decoding cost the sum.
    """
    if tables.mixed_attention is None or not tokens:
        decode = tables.decode_attention.at(decoding, context) if decoding else 0.0
        return _prompts(tables, tokens, past) + decode
    at = tables.mixed_attention.at
    chunks = sorted(zip(tokens, past, strict=True))
    beside = at(*chunks.pop(), decoding, context if decoding else 0.0)
    return beside + sum(at(new, cached, 0.0, 0.0) for new, cached in chunks)


def _prompts(tables: LayerTables, tokens: Sequence[float], past: Sequence[float]) -> float:
    """Return the seconds of the prompts' own kernels."""
    uncached = [new for new, cached in zip(tokens, past, strict=True) if cached == 0]
    batch = tables.encode_attention.at
    seconds = sum(batch(len(uncached), new) for new in uncached) / len(uncached) if uncached else 0.0
    chunk = tables.chunk_attention.at
    return seconds + sum(chunk(new, cached) for new, cached in zip(tokens, past, strict=True) if cached > 0)


@dataclass(frozen=True, slots=True)
class Chunks:
    """Prompts, or chunks of them, that one iteration prefills: one entry of each list per prompt."""

    tokens: Sequence[float]
    past: Sequence[float]
    """Tokens of each prompt that are already in the cache."""
    completed: int
    """Number of prompts that end in this iteration and give their first token."""


@dataclass(frozen=True, eq=False)
class StageCost:
    """Seconds of iterations on one stage of `layers` decoder layers and `encoder_layers` encoder layers."""

    group: Group
    layers: int
    first: bool = True
    last: bool = True
    encoder_layers: int = 0

    @property
    def tables(self) -> DegreeTables:
        """Return the group's tables."""
        return self.group.tables

    @property
    def overhead(self) -> Table:
        """Return the engine's overhead."""
        return self.group.overhead

    @property
    def encoder_decoder(self) -> bool:
        """Return whether prompts and output tokens go through different layers."""
        return self.group.encoder_decoder

    def of(self, parts: PartSeconds) -> Array:
        """Add up this stage's seconds from the parts of its group."""
        layers = self.layers * parts.layer + self.encoder_layers * parts.encoder_layer
        seconds: Array = np.asarray(layers + self.first * parts.embedding + self.last * parts.head + parts.engine)
        return seconds

    def encode_fixed(self, batch: ArrayLike, length: ArrayLike) -> Array:
        """Return the seconds to prefill `batch` prompts of one length."""
        return self.of(self.group.encode_fixed(batch, length))

    def decode(self, batch: ArrayLike, context: ArrayLike) -> Array:
        """Return the seconds of one decode step of `batch` sequences (at least one) with this mean context."""
        return self.of(self.group.decode(batch, context))

    def cross_projection(self, tokens: ArrayLike) -> Array:
        """Return the seconds of an encoder-decoder's decoder layers for keys and values of `tokens` encoded tokens."""
        seconds: Array = self.layers * self.group.cross_projection(tokens)
        return seconds

    def step(self, chunks: Chunks | None, decoding: int, context: float) -> float:
        """Return the seconds of one concrete iteration: prompts or chunks of any lengths, and `decoding` sequences."""
        tokens, past, completed = (chunks.tokens, chunks.past, chunks.completed) if chunks else ((), (), 0)
        new, verified = sum(tokens), self.group.rows * decoding
        rows = verified if self.encoder_decoder else verified + completed  # no token is sampled after an encoder
        seconds = self._concrete_layers(tokens, past, new, decoding, context)
        if self.first:
            seconds += self.tables.embedding.at(new + verified)
        if self.last and rows:
            seconds += self.tables.head.at(rows)
        return seconds + self.overhead.at(decoding + len(tokens))

    def _concrete_layers(
        self, tokens: Sequence[float], past: Sequence[float], new: float, decoding: int, context: float
    ) -> float:
        encoder, decoder = self.tables.encoder, self.tables.decoder
        if encoder is None:
            attention = iteration_attention(decoder, tokens, past, decoding, context)
            return self.layers * (decoder.rest.at(new + self.group.rows * decoding) + attention)
        seconds = 0.0
        if tokens:
            seconds += self.encoder_layers * (encoder.rest.at(new) + iteration_attention(encoder, tokens, past, 0, 0.0))
            if decoder.cross_projection is not None:
                seconds += self.layers * decoder.cross_projection.at(new)
        if decoding:
            attention = iteration_attention(decoder, (), (), decoding, context)
            seconds += self.layers * (decoder.rest.at(decoding) + attention)
        return seconds


def stage_costs(
    stages: Sequence[Stage], group: Callable[[int], Group], drafting: Callable[[int, int], Group] | None = None
) -> tuple[StageCost, ...]:
    """Return the costs of the stages of one phase, in order; equal stages share one.

    `group(tp)` returns the group of a tensor-parallel degree. `drafting(tp, layers)` returns that of the last stage,
    which has so many layers and drafts tokens; None: no tokens are drafted.
    """
    costs_by_shape: dict[object, StageCost] = {}
    costs = []
    for place, stage in enumerate(stages):
        decoders, encoders = (
            stop - start for start, stop in (stage.decoder_layers or (0, 0), stage.encoder_layers or (0, 0))
        )
        shape = (decoders, place == 0, place == len(stages) - 1, encoders)
        if (stage.tp, shape) not in costs_by_shape:
            drafts = drafting is not None and place == len(stages) - 1
            of_stage = drafting(stage.tp, decoders) if drafting and drafts else group(stage.tp)
            costs_by_shape[stage.tp, shape] = StageCost(of_stage, *shape)
        costs.append(costs_by_shape[stage.tp, shape])
    return tuple(costs)
