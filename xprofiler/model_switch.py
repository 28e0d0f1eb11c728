"""Switch of model: how much longer an iteration takes after other models' iterations on the same device.

Two models of 30 to 75 MB that alternate on a core decode 25 to 50 % slower than each alone. Each finds fewer of
its weights in the shared cache. Its caches recover within some ten iterations of its own, and are as cold as they get
after some five alternations. On a GPU, whose caches hold little of a model, it isn't measured.
"""

from collections.abc import Callable

import numpy as np

from xprofiler.timing import Timing, cpu_clock

_RECOVERS, _COOLS = 12, 6
"""Calls after which the caches no longer change: without the other models' calls between, and with them."""
_KEPT = 6
"""Number of later calls that count."""


def switch_seconds(call: Callable[[], object], other: Callable[[], object]) -> Timing:
    """Return how many seconds longer `call` takes when `other` is called before each call; never negative."""
    alone = float(np.median(_row(cpu_clock(call), _RECOVERS)))
    switched = _row(cpu_clock(call, other), _COOLS)
    low, median, high = np.percentile(switched, [25, 50, 75])
    return Timing(max(0.0, float(median) - alone), float((high - low) / median))


def _row(clock: Callable[[], float], left_out: int) -> list[float]:
    """Return the seconds of consecutive calls, without the first `left_out`."""
    return [clock() for _ in range(left_out + _KEPT)][left_out:]
