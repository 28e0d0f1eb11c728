"""Seconds of device time, and what this device reaches at most: its bandwidths and its matrix rate."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from benchmarks.kernels.case import Case, Make
from xcore.errors import InputError
from xcore.specs.device_names import device_kind
from xprofiler import machine

_RUNS = 21
_BYTES = 2**31
"""That are copied and read to measure bandwidths."""
_FLUSH_BYTES = 256 * 2**20
"""More than any cache: what a kernel reads lies in memory again before each run."""


Clock = Callable[[Make, Make], float]
"""Seconds of a call, and of which other call the code is the same."""


@dataclass(frozen=True)
class Roofline:
    """What was measured on this device, and what its data sheet promises."""

    bandwidth: float
    """Bytes/s read and written by a large copy."""
    rate: float
    """FLOP/s of a large matrix product."""
    read_bandwidth: float | None = None
    """Bytes/s that reading alone reaches, which is more than a copy; None where it wasn't measured."""
    sheet_bandwidth: float | None = None
    """Bytes/s of the data sheet; None for a device that isn't known."""

    @property
    def reading(self) -> float:
        """Bytes/s that a kernel can reach that writes next to nothing."""
        return self.read_bandwidth or self.bandwidth

    @property
    def bandwidths(self) -> dict[str, float]:
        """The bandwidths that are known, by name."""
        named = {"copy": self.bandwidth, "read": self.read_bandwidth, "data sheet": self.sheet_bandwidth}
        return {name: bandwidth for name, bandwidth in named.items() if bandwidth}


@dataclass(frozen=True)
class Timed:
    """A kernel's time beside its peers'."""

    seconds: float
    peers: dict[str, float | str]
    """Seconds, or why there are none."""
    share: float
    """Of the roofline: its time for the least bytes and operations, over the kernel's time. Its bandwidth is that
    of reading for kernels that write next to nothing, that of a copy for others."""
    shares: dict[str, float] = field(default_factory=dict)
    """The same by each of the roofline's bandwidths."""


def measure_roofline(dtype: torch.dtype, device: torch.device) -> Roofline:
    """Copy 2 GiB, read them, and multiply square matrices of 8192; on the CPU, the profiler's figures in float32."""
    if device.type == "cpu":
        return Roofline(machine.read_bandwidth_bytes_s(), machine.matrix_flops_s())
    sheet = sheet_bandwidth(torch.cuda.get_device_name(device))
    return Roofline(_copy_bandwidth(device), _matrix_rate(dtype, device), _read_bandwidth(device), sheet)


def sheet_bandwidth(name: str) -> float | None:
    """The memory bandwidth of a GPU's data sheet, by torch's name for it, in bytes/s; None where it isn't built in."""
    try:
        return device_kind(name).bandwidth_bytes_s
    except InputError:
        return None


def _copy_bandwidth(device: torch.device) -> float:
    source = torch.empty(_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / device_seconds(lambda: target.copy_(source))


def _read_bandwidth(device: torch.device) -> float:
    from benchmarks.kernels.read import partial_sums

    source = torch.zeros(_BYTES // 4, dtype=torch.int32, device=device)
    return _BYTES / device_seconds(lambda: partial_sums(source))


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

    def share(bandwidth: float) -> float:
        return max(case.bytes / bandwidth, case.flops / roofline.rate) / seconds

    shares = {name: share(bandwidth) for name, bandwidth in roofline.bandwidths.items()}
    return Timed(seconds, others, share(roofline.reading if case.reads else roofline.bandwidth), shares)


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
    return float(statistics.median(begin.elapsed_time(end) for begin, end in events)) / 1e3


def cpu_seconds(function: Make, alike: Make) -> float:
    """Median time on the CPU, as of a layer among others: what it reads lies in memory, and its code in the cache
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
