"""Measuring on a GPU, with a device whose clock is this test's."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from xcore.specs.cluster import local_cluster
from xcore.specs.model import ModelSpec
from xprofiler import machine
from xprofiler.measure import measure_profile
from xprofiler.timing import timed

GPU = torch.device("cuda", 0)


@pytest.fixture
def clocked(monkeypatch):
    """CUDA's graphs and events over a device on which each call takes 2 ms: how often it was called."""
    calls, now, captured, idle = [], [0.0], [], [True]

    class Graph:
        def replay(self):
            now[0] += 2.0 * len(captured) + 1.0 * idle[0]  # an idle device waits for it
            idle[0] = True

    def flush():
        now[0] += 50.0
        idle[0] = False

    @contextlib.contextmanager
    def graph(_):
        before = len(calls)
        yield
        captured[:] = calls[before:]

    def event(enable_timing):
        at = SimpleNamespace(ms=None, synchronize=lambda: None)
        at.record = lambda: setattr(at, "ms", now[0])
        at.elapsed_time = lambda end: end.ms - at.ms
        return at

    fakes = {
        "synchronize": lambda device: None,
        "CUDAGraph": Graph,
        "graph": graph,
        "Event": event,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: SimpleNamespace(zero_=flush))
    return calls, captured


def test_a_call_takes_its_share_of_a_graph(clocked):
    calls, captured = clocked
    timing = timed(lambda: calls.append(1), device=GPU)
    assert timing.seconds == pytest.approx(0.002) and timing.spread == pytest.approx(0)
    assert len(captured) == 5  # 10 ms, by the device's clock


def test_this_machines_gpu(monkeypatch):
    properties = SimpleNamespace(name="Some GPU", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: properties.name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine, "matrix_flops_s", lambda size, device, dtype: {torch.float32: 1e13}.get(dtype, 1e14))
    monkeypatch.setattr(machine, "read_bandwidth_bytes_s", lambda size, device: 2e12)
    cluster = machine.local(GPU)
    assert cluster.device.kind == "Some GPU" and cluster.device.memory_bytes == 80 * 2**30
    assert cluster.device.flops_s == {"fp32": 1e13, "bf16": 1e14, "fp16": 1e14} and not cluster.is_cpu
    assert machine.which(cluster) == torch.device("cuda") and machine.which(local_cluster()) == torch.device("cpu")
    there = machine.provenance(GPU)
    assert there["device"] == "Some GPU" and there["attention"].startswith("triton")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert machine.provenance()["products"] == "in tiles" and "products" not in machine.provenance(GPU)
    properties.name = "Another GPU"
    assert machine.which(cluster) is None


def test_the_gpu_that_is_measured_is_the_current_one(monkeypatch):
    """On which Triton launches, and streams and moments are: of several ranks, each has another."""

    class Asked(Exception):
        pass

    def set_device(device):
        raise Asked(device)

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    with pytest.raises(Asked, match="cuda:1"):
        measure_profile(ModelSpec("m", "llama", 1, 8, 1, 1, 8, 8, True, 9, 9), device=torch.device("cuda", 1))
