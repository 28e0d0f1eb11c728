"""The pipeline as an exact recurrence over (iteration, micro-batch, stage) (docs/theory.md).

A cell starts when its stage is free and its input has arrived from the previous stage. On the first stage, a decode
cell also needs its micro-batch's previous token. Every stage works in the same order: a phase's encoding micro-batches,
then its decode iterations, then the next phase.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from xcore.arrays import Array
from xsimulator.cost.recurrences import iterations, phases, tandem

_APART = 1e-9
_PHASES = 200
"""Phases after which the search for a cycle ends."""


@dataclass(frozen=True)
class PhaseTimes:
    """One phase of a pipeline that repeats it, in seconds from the start of its encoding on the first stage."""

    period: float
    """Time from the start of one phase to the start of the next."""
    encoded: float
    """When the last encoding micro-batch leaves the last stage."""
    decoded: Array
    """[N_D]: when each decode iteration leaves the last stage."""
    first_encoded: tuple[float, float]
    """When encoding micro-batches leave the last stage: mean and deviation over them."""
    first_decoded: tuple[float, float]
    """When the first decode iteration's micro-batches leave the last stage: mean and deviation over them."""

    def together(self, first_by_encoding: bool) -> float:
        """Return by what share the spread of the micro-batches' first tokens shrinks by their last; above 0."""
        if not first_by_encoding:
            return _APART
        encoded, decoded = self.first_encoded[1], self.first_decoded[1]
        return max(1.0 - decoded / encoded, _APART) if encoded else 1.0

    @property
    def lead(self) -> float:
        """Return the mean seconds between the exits of a decoding micro-batch and of the last one."""
        return float(self.decoded[0] - self.first_decoded[0])


def phase_times(
    encode: Array,
    decode: Array,
    micro_batches: int = 1,
    hops: tuple[Array, Array] | None = None,
    repeats: bool = True,
    sequences: int | None = None,
) -> PhaseTimes:
    """Return the steady phase of a pipeline.

    All times are seconds per cell: one micro-batch on one stage.

    Args:
        encode: [encoding micro-batches, stages].
        decode: [iterations, stages], or if micro-batches differ [iterations, micro-batches, stages].
        micro_batches: Decoding micro-batches.
        hops: Seconds from the previous stage to each stage [stages], of an encoding and of a decoding micro-batch.
        repeats: Run the phase until its period settles. Otherwise run it once in an empty pipeline; its period is then
            its length.
        sequences: Sequences encoded in a phase; if they are fewer than the micro-batches, they join these in turn.
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
    """Return exit times of encoding micro-batches that come in any order.

    The recurrence takes the shortest first, so its times are too early for all except the last.
    """
    ends = list(itertools.accumulate(encode[:, encode.sum(axis=0).argmax()].tolist()))
    count, mean_end = len(ends), sum(ends) / len(ends)
    each = ends[-1] / count  # if all of them took equally long
    later = each * (count + 1) / 2 - mean_end
    wider = each * ((count**2 - 1) / 12) ** 0.5 - (sum((end - mean_end) ** 2 for end in ends) / count) ** 0.5
    return mean + later, max(deviation + wider, 0.0)


def iteration_times(decode: Array, hop: Array) -> tuple[Array, Array]:
    """Return the start and end in seconds of every cell of decode iterations alone, from an empty pipeline.

    Both have the shape of `decode`, [iterations, micro-batches, stages]. `hop` [stages] is as in `phase_times`.
    """
    decode = np.asarray(decode, dtype=np.float64, order="C")
    starts, ends = np.empty(decode.shape), np.empty(decode.shape)
    iterations(decode, hop, np.zeros(decode.shape[1]), starts, ends)
    return starts, ends


def tandem_times(seconds: Array, hop: Array, most: int) -> tuple[float, float, float]:
    """Run items one after the other through stages, at most `most` at once.

    `seconds` is [items, stages]; `hop` [stages] is as in `phase_times`.

    Returns:
        The mean seconds between two items, and the mean and deviation of an item's time from its start to its exit.
    """
    starts, outs = np.empty(len(seconds)), np.empty(len(seconds))
    tandem(np.asarray(seconds, dtype=np.float64, order="C"), hop, starts, outs, most)
    settled = slice(len(outs) // 4, None)
    way = (outs - starts)[settled]
    between = (outs[-1] - outs[settled][0]) / (len(way) - 1)
    return float(between), float(way.mean()), float(way.std())
