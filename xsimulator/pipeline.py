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
    starts: Array
    """[cells, stages]: encoding micro-batches first, then decoding cells by iteration and micro-batch."""
    ends: Array
    """[cells, stages]"""


@njit(cache=True)
def _recurrence(
    encode: Any, decode: Any, encode_hop: Any, decode_hop: Any, micro_batches: int, free: Any, previous: Any
) -> Any:
    """Start and end of every cell of one phase. `free` [stages] and `previous` [micro_batches], when each stage is
    free and each micro-batch's last token is out, are updated for the next phase.
    """
    encodes, stages = encode.shape
    iterations, apart = decode.shape[0], decode.shape[1] > 1
    cells = encodes + iterations * micro_batches
    starts, ends = np.empty((cells, stages)), np.empty((cells, stages))
    for cell in range(cells):
        is_encode = cell < encodes
        iteration = 0 if is_encode else (cell - encodes) // micro_batches
        micro_batch = 0 if is_encode else (cell - encodes) % micro_batches
        for s in range(stages):
            ready = free[s]
            if s > 0:
                ready = max(ready, ends[cell, s - 1] + (encode_hop[s] if is_encode else decode_hop[s]))
            elif not is_encode:
                ready = max(ready, previous[micro_batch])
                if iteration == 0 and encodes > 0:  # the new sequences of this micro-batch have been encoded
                    share = min(encodes - 1, (micro_batch + 1) * encodes // micro_batches - 1)
                    ready = max(ready, ends[max(share, 0), stages - 1])
            starts[cell, s] = ready
            ends[cell, s] = ready + (encode[cell, s] if is_encode else decode[iteration, micro_batch * apart, s])
            free[s] = ends[cell, s]
        if not is_encode:
            previous[micro_batch] = ends[cell, stages - 1]
    return starts, ends


@njit(cache=True)
def _settled(encode: Any, decode: Any, encode_hop: Any, decode_hop: Any, micro_batches: int, phases: int) -> Any:
    """One phase's starts and ends, and the seconds per phase once the pipeline's state is that of a few phases before,
    later by the same time everywhere; after `phases` of them the mean over the later half is close.
    """
    stages = encode.shape[1]
    size = stages + micro_batches
    states = np.zeros((phases, size))
    free, previous = np.zeros(stages), np.zeros(micro_batches)
    starts, ends = _recurrence(encode, decode, encode_hop, decode_hop, micro_batches, free, previous)
    for phase in range(phases):
        states[phase, :stages], states[phase, stages:] = free, previous
        for back in range(1, min(phase, _LONGEST_CYCLE) + 1):
            low, high = np.inf, -np.inf
            for i in range(size):
                later = states[phase, i] - states[phase - back, i]
                low, high = min(low, later), max(high, later)
                if high - low > 1e-9 * high:
                    break
            if high - low <= 1e-9 * high:
                return starts, ends, high / back
        starts, ends = _recurrence(encode, decode, encode_hop, decode_hop, micro_batches, free, previous)
    half = phases // 2
    return starts, ends, (states[-1] - states[half]).max() / (phases - 1 - half)


def phase_times(
    encode: Array, decode: Array, micro_batches: int = 1, hops: tuple[Array, Array] | None = None, repeats: bool = True
) -> PhaseTimes:
    """The steady phase of a pipeline.

    `encode` [encoding micro-batches, stages] and `decode` [iterations, stages], or where micro-batches differ
    [iterations, micro-batches, stages], are seconds per cell (one micro-batch on one stage); `hops`, the seconds from
    the stage before to each stage [stages], of an encoding and of a decoding micro-batch. With `repeats` the phase is
    run until its period settles; without, once from an empty pipeline (its period is then its length).
    """
    encode = np.ascontiguousarray(encode, dtype=np.float64)
    decode = np.ascontiguousarray(decode, dtype=np.float64)
    decode = decode if decode.ndim == 3 else decode[:, None, :]
    stages = encode.shape[1]
    encode_hop, decode_hop = (np.zeros(stages), np.zeros(stages)) if hops is None else hops
    if repeats:
        starts, ends, period = _settled(encode, decode, encode_hop, decode_hop, micro_batches, _PHASES)
    else:
        fresh = np.zeros(stages), np.zeros(micro_batches)
        starts, ends = _recurrence(encode, decode, encode_hop, decode_hop, micro_batches, *fresh)
        period = ends.max()
    origin = starts[0, 0]
    starts, ends = starts - origin, ends - origin
    encodes = len(encode)
    decoded = ends[encodes:, -1].reshape(len(decode), micro_batches).max(axis=1)
    encoded = float(ends[:encodes, -1].max()) if encodes else 0.0
    return PhaseTimes(float(period), encoded, decoded, starts, ends)
