"""The pipeline as an exact recurrence over (iteration, micro-batch, stage) (spec section 5).

A cell starts when its stage is free, its input has arrived from the stage before, and, on the first stage of a
decoding iteration, the micro-batch's own previous token is out. Every stage works in the same order: a phase's
encoding micro-batches, then its decoding iterations, then the next phase's.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

Array = NDArray[np.float64]

_PHASES = 200
"""Phases after which the search for a cycle ends."""
_LONGEST_CYCLE = 12
"""Phases of the longest cycle that is looked for."""


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


@njit(cache=True)
def _phase(
    encode: Any,
    decode: Any,
    encode_hop: Any,
    decode_hop: Any,
    micro_batches: int,
    joins: int,
    turn: int,
    free: Any,
    previous: Any,
    out: Any,
) -> float:
    """One phase: when it starts; `out` [cells] becomes when each cell leaves the last stage.

    Where fewer than `micro_batches` sequences are encoded, `joins` of them, they join in turn from micro-batch `turn`.
    `free` [stages] and `previous` [micro_batches], when each stage is free and each micro-batch's last token is out,
    are updated for the next phase.
    """
    encodes, stages = encode.shape
    iterations, apart = decode.shape[0], decode.shape[1] > 1
    started = free[0]
    for cell in range(encodes):
        ready = free[0]
        for s in range(stages):
            if s > 0:
                ready = max(free[s], ready + encode_hop[s])
            ready += encode[cell, s]
            free[s] = ready
        out[cell] = ready
    cell = encodes
    for iteration in range(iterations):
        for micro_batch in range(micro_batches):
            ready = max(free[0], previous[micro_batch])
            if iteration == 0 and encodes > 0:  # the new sequences of this micro-batch have been encoded
                if joins >= micro_batches:
                    share = min(encodes - 1, (micro_batch + 1) * encodes // micro_batches - 1)
                    ready = max(ready, out[max(share, 0)])
                elif (micro_batch - turn) % micro_batches < joins:
                    ready = max(ready, out[(micro_batch - turn) % micro_batches * encodes // joins])
            if cell == 0:
                started = ready
            for s in range(stages):
                if s > 0:
                    ready = max(free[s], ready + decode_hop[s])
                ready += decode[iteration, micro_batch * apart, s]
                free[s] = ready
            previous[micro_batch] = ready
            out[cell] = ready
            cell += 1
    return float(started)


@njit(cache=True)
def _settled(
    encode: Any, decode: Any, encode_hop: Any, decode_hop: Any, micro_batches: int, joins: int, phases: int
) -> Any:
    """A phase's start, when its cells leave the last stage, and the seconds per phase: once the pipeline's state is
    that of a few phases before, later by the same time everywhere; after `phases` of them the mean over the later half
    is close.
    """
    stages = encode.shape[1]
    size = stages + micro_batches
    states = np.zeros((phases, size))
    free, previous = np.zeros(stages), np.zeros(micro_batches)
    out = np.empty(encode.shape[0] + decode.shape[0] * micro_batches)
    started = _phase(encode, decode, encode_hop, decode_hop, micro_batches, joins, 0, free, previous, out)
    for phase in range(phases):
        states[phase, :stages], states[phase, stages:] = free, previous
        for back in range(1, min(phase, _LONGEST_CYCLE) + 1):
            if joins < micro_batches and back * joins % micro_batches:
                continue  # another micro-batch's turn
            low, high = np.inf, -np.inf
            for i in range(size):
                later = states[phase, i] - states[phase - back, i]
                low, high = min(low, later), max(high, later)
                if high - low > 1e-9 * high:
                    break
            if high - low <= 1e-9 * high:
                return started, out, high / back
        turn = (phase + 1) * joins % micro_batches
        started = _phase(encode, decode, encode_hop, decode_hop, micro_batches, joins, turn, free, previous, out)
    half = phases // 2
    return started, out, (states[-1] - states[half]).max() / (phases - 1 - half)


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
    encode, decode, encode_hop, decode_hop = _checked(encode, decode, hops)
    stages, encodes = encode.shape[1], len(encode)
    joins = micro_batches if sequences is None else min(sequences, micro_batches)
    if repeats:
        started, out, period = _settled(encode, decode, encode_hop, decode_hop, micro_batches, joins, _PHASES)
    else:
        fresh = np.zeros(stages), np.zeros(micro_batches), np.empty(encodes + len(decode) * micro_batches)
        started = _phase(encode, decode, encode_hop, decode_hop, micro_batches, joins, 0, *fresh)
        out = fresh[2]
        period = fresh[0].max()
    out = out - started
    iterations = out[encodes:].reshape(len(decode), micro_batches)
    pieces = out[:encodes] if encodes else np.zeros(1)
    return PhaseTimes(
        period=float(period),
        encoded=float(pieces[-1]),
        decoded=iterations.max(axis=1),
        first_encoded=(float(pieces.mean()), float(pieces.std())),
        first_decoded=(float(iterations[0].mean()), float(iterations[0].std())),
    )


def _checked(encode: Array, decode: Array, hops: tuple[Array, Array] | None) -> tuple[Array, Array, Array, Array]:
    encode = np.ascontiguousarray(encode, dtype=np.float64)
    decode = np.ascontiguousarray(decode, dtype=np.float64)
    decode = decode if decode.ndim == 3 else decode[:, None, :]
    none = np.zeros(encode.shape[1])
    return encode, decode, *((none, none) if hops is None else hops)


@njit(cache=True)
def _iterations(decode: Any, hop: Any) -> Any:
    """Start and end of every cell [iterations, micro-batches, stages]."""
    iterations, micro_batches, stages = decode.shape
    starts, ends = np.empty(decode.shape), np.empty(decode.shape)
    free, previous = np.zeros(stages), np.zeros(micro_batches)
    for iteration in range(iterations):
        for m in range(micro_batches):
            ready = previous[m]
            for s in range(stages):
                ready = max(free[s], ready + (hop[s] if s > 0 else 0.0))
                starts[iteration, m, s] = ready
                ready += decode[iteration, m, s]
                ends[iteration, m, s] = free[s] = ready
            previous[m] = ready
    return starts, ends


def iteration_times(decode: Array, hop: Array) -> tuple[Array, Array]:
    """Start and end in seconds of every cell of iterations alone, from an empty pipeline: [iterations, micro-batches,
    stages], as `decode`; `hop` [stages] as in `phase_times`.
    """
    starts, ends = _iterations(np.ascontiguousarray(decode, dtype=np.float64), hop)
    return starts, ends


@njit(cache=True)
def _tandem(seconds: Any, hop: Any, most: int) -> Any:
    """Start of every item, and when it leaves the last stage."""
    items, stages = seconds.shape
    starts, outs, free = np.zeros(items), np.zeros(items), np.zeros(stages)
    for i in range(items):
        ready = max(free[0], outs[i - most] if i >= most else 0.0)
        starts[i] = ready
        for s in range(stages):
            ready = max(free[s], ready + (hop[s] if s > 0 else 0.0)) + seconds[i, s]
            free[s] = ready
        outs[i] = ready
    return starts, outs


def tandem(seconds: Array, hop: Array, most: int) -> tuple[float, float, float]:
    """Items one after the other through stages, at most `most` at once: the mean seconds between two of them, and the
    mean and deviation of an item's way. `seconds` [items, stages], `hop` [stages] as in `phase_times`.
    """
    starts, outs = _tandem(np.ascontiguousarray(seconds, dtype=np.float64), hop, most)
    settled = slice(len(outs) // 4, None)
    way = (outs - starts)[settled]
    between = (outs[-1] - outs[settled][0]) / (len(way) - 1)
    return float(between), float(way.mean()), float(way.std())
