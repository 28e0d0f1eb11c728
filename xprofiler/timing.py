"""Timing one call: warm-up, repeats, median and spread, from cold caches; on a GPU the device's own time."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

_CALLS = 8
_GRAPH_S = 0.01
"""A graph has at most `_CALLS` calls, and lasts at most this many seconds if it has several."""
_FLUSH_BYTES = 2**28
"""More than a GPU's cache."""


@dataclass(frozen=True)
class Timing:
    """Median wall seconds of a call, and the interquartile range as a share of it."""

    seconds: float
    spread: float


class Untimed:
    """A call within timed calls whose own time doesn't count."""

    def __init__(self, call: Callable[[], object]):
        self._call = call
        self.seconds = 0.0
        """The time of all calls so far."""

    def __call__(self) -> None:
        """Call it."""
        start = time.perf_counter()
        self._call()
        self.seconds += time.perf_counter() - start


def timed(
    call: Callable[[], object],
    budget_s: float = 0.05,
    least: int = 3,
    most: int = 20,
    device: "torch.device | None" = None,
    before: Callable[[], object] = lambda: None,
    warm_ups: int = 1,
    together: int = _CALLS,
    untimed: Untimed | None = None,
) -> Timing:
    """Time `call` after `warm_ups`, `least` to `most` times, as many as fit into `budget_s` seconds.

    Work queued on a GPU is timed on the GPU, from a cold cache, in graphs of at most `together` calls. On a CPU,
    `before` is called, untimed, before each call, and the time of `untimed`, which is part of `call`, doesn't count.
    """
    for _ in range(warm_ups):
        before()
        call()
    on_cpu = device is None or device.type == "cpu"
    clock = cpu_clock(call, before, untimed) if device is None or on_cpu else _gpu_clock(call, device, together)
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < least or (time.perf_counter() < end and len(times) < most):
        times.append(clock())
    return of_times(times)


def of_times(times: list[float]) -> Timing:
    """Return the Timing of several calls, given their seconds."""
    low, median, high = np.percentile(times, [25, 50, 75])
    return Timing(float(median), float((high - low) / median) if median else 0.0)


def cpu_clock(
    call: Callable[[], object], before: Callable[[], object] = lambda: None, untimed: Untimed | None = None
) -> Callable[[], float]:
    """Return a function that times one call on this thread, in seconds, without `untimed`.

    `before` is called first, untimed.
    """

    def seconds() -> float:
        before()
        left_out = untimed.seconds if untimed else 0.0
        start = time.perf_counter()
        call()
        elapsed = time.perf_counter() - start
        return elapsed - (untimed.seconds - left_out if untimed else 0.0)

    return seconds


def _gpu_clock(call: Callable[[], object], device: "torch.device", together: int) -> Callable[[], float]:
    """Return a function that times one call on the device, in seconds.

    Short calls are repeated in a graph, so that Python takes no time between them. The engine runs iterations by
    graphs, too.
    """
    import torch

    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)

    def captured(calls: int) -> Callable[[], float]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()

        def seconds() -> float:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()  # makes the cache cold; later work is queued before the device reaches it
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            milliseconds: float = begin.elapsed_time(end)
            return milliseconds / 1e3 / calls

        return seconds

    alone = captured(1)
    alone()  # the first launch takes longer
    # By the device's time: with the time of the launches, one and the same pass got other numbers of calls.
    calls = max(1, min(together, int(_GRAPH_S / alone())))
    return alone if calls == 1 else captured(calls)
