"""The event simulator, compiled (event_loop.c): what `compiled.py` packs for it."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Places = NDArray[np.intp]

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
    used: Array,
    places: Places,
    parents: Places,
    shared: Places,
    figures: Array,
    busy: Array,
) -> float | None:
    """Run one replica's requests, in order of arrival, to their ends, and return the seconds until the last piece of
    work was done; None where a bound was broken before.

    `arrivals` (seconds), `inputs`, `outputs` (tokens) and `flags` (1: counts, 2: counts for the latency too) are
    [requests]. `sides` are the packed stages, `settings` [policy, batch, its other variable, KV blocks, block size,
    whether encoder-decoder, admission grow, prefix caching, prefixes shared within a step, iterations ahead]. `limits`
    [3] are seconds of the time to first token, per output token, and of the latency; `missed` [3] of the requests that
    count have missed each already, `allowed` [3] may. `places` [requests], `parents` and `shared` [texts] are those of
    a `Prefixes`, empty without prefix caching. Written: `missed`; `used` [2], raised to the most of its batch and of
    its KV blocks that the policy used; `busy` [stages], seconds of work, and `figures` [requests, 6]: began, first
    token, finished (NaN where it hasn't happened); tokens found in the cache when first admitted, and in all;
    preemptions.
    """
