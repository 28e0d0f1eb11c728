"""What `Gpu` asks of CUDA, in which order and on which stream, recorded by a stand-in device."""

import contextlib
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from torch.cuda._utils import _get_device_index

from xrunner.comm.gpu import Gpu

CUDA = torch.device("cuda", 1)


@pytest.fixture
def calls(monkeypatch):
    """Everything that CUDA was asked for, in order."""
    calls = []
    streams = ["computing"]
    current_device, pools, into = [0], count(1), []

    class Stream:
        made = 0

        def __init__(self, device):
            assert device.index == current_device[-1]
            Stream.made += 1
            self.name = f"stream {Stream.made}"

        def wait_stream(self, other):
            calls.append(f"{self.name} waits for {other.name}")

    class Event:
        def record(self):
            calls.append(f"moment on {streams[-1]}")

    class Graph:
        def replay(self):
            calls.append("replay")

        def reset(self):
            calls.append("reset")

    @contextlib.contextmanager
    def on(stream):
        streams.append(stream.name)
        yield
        streams.pop()

    @contextlib.contextmanager
    def graph(made, pool, stream, capture_error_mode):
        assert capture_error_mode == "thread_local"
        into.append(pool)
        streams.append(stream.name if stream else "graph")
        yield
        streams.pop()

    class Current(SimpleNamespace):
        def wait_stream(self, other):
            calls.append(f"{self.name} waits for {other.name}")

    def current(device):
        return Current(name=streams[-1])

    def set_device(device):
        current_device.append(_get_device_index(device))
        calls.append(f"device {current_device[-1]}")

    fakes = {
        "set_device": set_device,
        "current_device": lambda: current_device[-1],
        "graph_pool_handle": lambda: next(pools),
        "Stream": Stream,
        "Event": Event,
        "stream": on,
        "graph": graph,
        "current_stream": current,
        "default_stream": lambda device: Current(name=streams[0]),
        "CUDAGraph": Graph,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return SimpleNamespace(calls=calls, streams=streams, into=into)


class Tensor:
    """A tensor of the device that records what is done to it."""

    is_cuda = True

    def __init__(self, calls, streams):
        self.calls, self.streams = calls, streams

    def copy_(self, source, non_blocking):
        assert non_blocking
        self.calls.append(f"copy on {self.streams[-1]}")

    def record_stream(self, stream):
        self.calls.append(f"kept for {stream.name}")


def test_a_copy_beside_waits_for_what_was_queued_and_keeps_its_tensors(calls):
    gpu = Gpu(CUDA)
    gpu.copy_beside(Tensor(calls.calls, calls.streams), SimpleNamespace(is_cuda=False))
    beside = ["stream 1 waits for computing", "copy on stream 1", "moment on stream 1", "kept for stream 1"]
    assert calls.calls == ["device 1", *beside]


def test_a_copy_in_order_is_on_the_computing_stream(calls):
    gpu = Gpu(CUDA)
    gpu.copy(Tensor(calls.calls, calls.streams), None)
    gpu.moment()
    assert calls.calls == ["device 1", "copy on computing", "moment on computing"]


def test_a_device_without_a_number_is_the_current_one(calls):
    assert Gpu(torch.device("cuda")).device == torch.device("cuda", 0)
    assert Gpu(CUDA).device == Gpu(torch.device("cuda")).device == CUDA


def test_a_graph_is_captured_after_two_calls_on_the_stream_that_computes(calls):
    gpu = Gpu(CUDA)
    replay = gpu.capture(lambda: calls.calls.append(f"compute on {calls.streams[-1]}"))
    assert calls.calls == ["device 1", *["compute on computing"] * 2, "compute on graph", "replay"]
    replay()
    assert calls.calls[-2:] == ["replay"] * 2


def test_a_graph_keeps_to_the_stream_of_a_share(calls):
    """By which its kernels have that share of the multiprocessors."""
    gpu = Gpu(CUDA)
    with torch.cuda.stream(SimpleNamespace(name="half")):
        gpu.capture(lambda: calls.calls.append(f"compute on {calls.streams[-1]}"))
    assert calls.calls == ["device 1", *["compute on half"] * 3, "replay"]


def test_graphs_share_no_memory_with_those_before_a_new_beginning(calls):
    gpu = Gpu(CUDA)
    for _ in range(2):
        gpu.begin_graphs()
        for _ in range(3):
            gpu.capture(lambda: None)
    first, *others = calls.into
    assert others[:2] == [first] * 2 and others[2:] == [others[2]] * 3 and others[2] != first


def test_all_graphs_that_are_left_are_dropped(calls):
    gpu = Gpu(CUDA)
    kept, gone = (gpu.capture(lambda: None) for _ in range(2))
    del gone
    for _ in range(2):
        gpu.drop_graphs()
    assert calls.calls.count("reset") == 1 and kept


def test_a_graph_is_captured_after_two_runs_on_the_computing_stream(calls):
    gpu, seen = Gpu(CUDA), []
    gpu.capture(lambda: seen.append(calls.streams[-1]))
    assert seen == ["computing"] * 2 + ["graph"]
