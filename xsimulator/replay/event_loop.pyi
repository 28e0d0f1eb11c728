"""The event simulator, compiled (event_loop.c): what `compiled.py` packs for it."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

def run(
    arrivals: Array,
    inputs: Array,
    outputs: Array,
    flags: Array,
    sides: Array,
    settings: Array,
    limits: Array,
    allowed: Array,
    missed: Array,
    times: Array,
    busy: Array,
) -> bool:
    """Run one replica's requests, in order of arrival, to their ends; False where a bound was broken before.

    `arrivals` (seconds), `inputs`, `outputs` (tokens) and `flags` (1: counts, 2: counts for the latency too) are
    [requests]. `sides` are the packed stages, `settings` [policy, batch, its other variable, KV blocks, block size,
    whether encoder-decoder]. `limits` [3] are seconds of the time to first token, per output token, and of the latency;
    `missed` [3] of the requests that count have missed each already, `allowed` [3] may. Written: `missed`, `times`
    [requests, 3] (began, first token, finished; NaN where it hasn't happened) and `busy` [stages], seconds of work.
    """
