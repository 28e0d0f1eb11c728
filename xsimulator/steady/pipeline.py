"""The pipeline as an exact recurrence over (iteration, micro-batch, stage) (docs/theory.md).

A cell starts when its stage is free, its input has arrived from the stage before, and, on the first stage of a
decoding iteration, the micro-batch's own previous token is out. Every stage works in the same order: a phase's
encoding micro-batches, then its decoding iterations, then the next phase's.
"""

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xsimulator.cost.recurrences import iterations, phases, tandem

Array = NDArray[np.float64]

_APART = 1e-9
_PHASES = 200
"""Phases after which the search for a cycle ends."""


@dataclass(frozen=True)
class PhaseTimes:
    """One phase in a pipeline that repeats it, times in seconds from the start of its encoding on the first stage."""

    period: float
    """From one phase's start to the next one's."""
    encoded: float
    """When the last encoding micro-batch leaves the last stage."""
    decoded: Array
    """[N_D]: when each decoding iteration leaves the last stage."""
    first_encoded: tuple[float, float]
    """Mean and deviation over the encoding micro-batches of when one leaves the last stage."""
    first_decoded: tuple[float, float]
    """The same of the first iteration's micro-batches."""

    def together(self, first_by_encoding: bool) -> float:
        """Share of the spread of the micro-batches' first tokens that is gone at their last tokens; more than 0."""
        if not first_by_encoding:
            return _APART
        encoded, decoded = self.first_encoded[1], self.first_decoded[1]
        return max(1.0 - decoded / encoded, _APART) if encoded else 1.0

    @property
    def lead(self) -> float:
        """Mean seconds between a decoding micro-batch's exit and the last one's."""
        return float(self.decoded[0] - self.first_decoded[0])


def phase_times(
    encode: Array,
    decode: Array,
    micro_batches: int = 1,
    hops: tuple[Array, Array] | None = None,
    repeats: bool = True,
    sequences: int | None = None,
) -> PhaseTimes:
    """The steady phase of a pipeline.

    `encode` [encoding micro-batches, stages] and `decode` [iterations, stages], or where micro-batches differ
    [iterations, micro-batches, stages], are seconds per cell (one micro-batch on one stage); `hops`, the seconds from
    the stage before to each stage [stages], of an encoding and of a decoding micro-batch. With `repeats` the phase is
    run until its period settles; without, once from an empty pipeline (its period is then its length). `sequences` are
    encoded in a phase: where they are fewer than the micro-batches, they join these in turn.
    """
    encode = np.asarray(encode, dtype=np.float64, order="C")
    decode = np.asarray(decode, dtype=np.float64, order="C")
    encode_hop, decode_hop = hops or (np.zeros(encode.shape[1]),) * 2
    joins = micro_batches if sequences is None else min(sequences, micro_batches)
    decoded = np.empty(len(decode))
    most = _PHASES if repeats else 1
    period, encoded, first_encoded, first_decoded = phases(
        encode, decode, encode_hop, decode_hop, decoded, micro_batches, joins, most
    )
    if len(encode) > 1:
        first_encoded = _in_any_order(encode, *first_encoded)
    return PhaseTimes(period, encoded, decoded, first_encoded, first_decoded)


def _in_any_order(encode: Array, mean: float, deviation: float) -> tuple[float, float]:
    """Return exit times of encoding micro-batches that come in any order. The recurrence takes the shortest first, so
    its times are too early for all but the last.
    """
    ends = list(itertools.accumulate(encode[:, encode.sum(axis=0).argmax()].tolist()))
    count, mean_end = len(ends), sum(ends) / len(ends)
    each = ends[-1] / count  # if all of them took equally long
    later = each * (count + 1) / 2 - mean_end
    wider = each * ((count**2 - 1) / 12) ** 0.5 - (sum((end - mean_end) ** 2 for end in ends) / count) ** 0.5
    return mean + later, max(deviation + wider, 0.0)


def iteration_times(decode: Array, hop: Array) -> tuple[Array, Array]:
    """Start and end in seconds of every cell of iterations alone, from an empty pipeline: [iterations, micro-batches,
    stages], as `decode`; `hop` [stages] as in `phase_times`.
    """
    decode = np.asarray(decode, dtype=np.float64, order="C")
    starts, ends = np.empty(decode.shape), np.empty(decode.shape)
    iterations(decode, hop, np.zeros(decode.shape[1]), starts, ends)
    return starts, ends


def tandem_times(seconds: Array, hop: Array, most: int) -> tuple[float, float, float]:
    """Items one after the other through stages, at most `most` at once: the mean seconds between two of them, and the
    mean and deviation of an item's way. `seconds` [items, stages], `hop` [stages] as in `phase_times`.
    """
    starts, outs = np.empty(len(seconds)), np.empty(len(seconds))
    tandem(np.asarray(seconds, dtype=np.float64, order="C"), hop, starts, outs, most)
    settled = slice(len(outs) // 4, None)
    way = (outs - starts)[settled]
    between = (outs[-1] - outs[settled][0]) / (len(way) - 1)
    return float(between), float(way.mean()), float(way.std())
