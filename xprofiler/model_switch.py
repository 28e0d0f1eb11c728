"""Switch of model: how much longer an iteration takes after other models' on the same device.

Two models of 30 and 66 MB that take turns on a core decode 23 to 31 % slower than each one alone, as each finds less of
its weights in the shared cache; where the core is busy half of the time, requests take 20 % longer by it. On a GPU,
whose caches hold little of a model, it isn't measured.
"""

from collections.abc import Callable

import numpy as np

from xprofiler.timing import Timing, cpu_clock

_ROUNDS = 3
_CALLS = 4
"""In a row; the first, which finds what the other kind has left, doesn't count."""


def switch_seconds(call: Callable[[], object], usual: Callable[[], object], other: Callable[[], object]) -> Timing:
    """Seconds that `call` takes longer where before each call `other` is called too, and not `usual` alone; never
    negative.
    """
    clocks = cpu_clock(call, usual), cpu_clock(call, lambda: (usual(), other()))
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(_ROUNDS):
        for seconds, kept in zip(clocks, times, strict=True):
            kept += [seconds() for _ in range(_CALLS)][1:]
    alone, switched = (float(np.median(kept)) for kept in times)
    low, high = np.percentile(times[1], [25, 75])
    return Timing(max(0.0, switched - alone), float((high - low) / switched))
