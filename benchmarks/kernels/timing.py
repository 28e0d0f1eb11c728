"""Seconds of device time, and what this device reaches at most: its copy bandwidth and its matrix rate."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.kernels.cases import Case, Make
from xprofiler import machine

_RUNS = 21
_FLUSH_BYTES = 256 * 2**20
"""More than any cache: what a kernel reads lies in memory again before each run."""


Clock = Callable[[Make, Make], float]
"""Seconds of a call, and of which other call the code is the same."""


@dataclass(frozen=True)
class Roofline:
    """What was measured on this device."""

    bandwidth: float
    """Bytes/s read and written by a large copy."""
    rate: float
    """FLOP/s of a large matrix product."""


@dataclass(frozen=True)
class Timed:
    """A kernel's time beside its peers'."""

    seconds: float
    peers: dict[str, float | str]
    """Seconds, or why there are none."""
    share: float
    """Of the roofline: what it says for the least bytes and operations, over the kernel's time."""


def measure_roofline(dtype: torch.dtype, device: torch.device) -> Roofline:
    """Copy 2 GiB, and multiply square matrices of 8192; on the processor, what the profiler says of it in float32."""
    if device.type == "cpu":
        return Roofline(machine.read_bandwidth_bytes_s(), machine.matrix_flops_s())
    return Roofline(_bandwidth(device), _matrix_rate(dtype, device))


def _bandwidth(device: torch.device) -> float:
    source = torch.empty(2**31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / device_seconds(lambda: target.copy_(source))


def _matrix_rate(dtype: torch.dtype, device: torch.device) -> float:
    a, b = (torch.randn(8192, 8192, dtype=dtype, device=device) for _ in range(2))
    return 2 * 8192**3 / device_seconds(lambda: a @ b)


def time_case(case: Case, roofline: Roofline, clock: Clock, twin: Case | None = None) -> Timed:
    """Time a case and its peers by a clock of below; `twin` is the same case over other tensors. A peer that fails says
    why; the kernel itself may not.
    """
    twin = twin or case
    seconds = clock(case.run, twin.run)
    others: dict[str, float | str] = {}
    twins = twin.peers()
    for name, peer in case.peers().items():
        try:
            others[name] = clock(peer, twins[name])
        except Exception as error:  # a peer's, whatever it is: reported in its place
            others[name] = f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:120]}"
    bound = max(case.bytes / roofline.bandwidth, case.flops / roofline.rate)
    return Timed(seconds, others, bound / seconds)


def device_seconds(function: Make, alike: Make | None = None) -> float:
    """Median time on the device, launched as a CUDA graph, so that Python's share is none, with a cold cache."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_RUNS)]
    for begin, end in events:
        flush.zero_()
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) / 1e3


def processor_seconds(function: Make, alike: Make) -> float:
    """Median time on the processor, as of a layer among others: what it reads lies in memory, and its code in the cache
    since `alike`, the same over other tensors.
    """
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8)
    function()
    times = []
    for _ in range(_RUNS):
        flush.zero_()
        alike()
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
