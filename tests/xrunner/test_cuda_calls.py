"""What `Gpu` asks of CUDA, in which order and on which stream, told by a device that isn't there."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from xrunner.gpu import Gpu

CUDA = torch.device("cuda", 1)


@pytest.fixture
def said(monkeypatch):
    """Everything that CUDA was asked for, in order."""
    said = []
    streams = ["computing"]

    class Stream:
        made = 0

        def __init__(self, device):
            assert device == CUDA
            Stream.made += 1
            self.name = f"stream {Stream.made}"

        def wait_stream(self, other):
            said.append(f"{self.name} waits for {other.name}")

    class Event:
        def record(self):
            said.append(f"moment on {streams[-1]}")

    @contextlib.contextmanager
    def on(stream):
        streams.append(stream.name)
        yield
        streams.pop()

    @contextlib.contextmanager
    def graph(made, pool, capture_error_mode):
        assert pool == "pool" and capture_error_mode == "thread_local"
        streams.append("graph")
        yield
        streams.pop()

    def current(device):
        name = streams[-1]
        return SimpleNamespace(name=name, wait_stream=lambda other: said.append(f"{name} waits for {other.name}"))

    fakes = {
        "set_device": lambda device: said.append(f"device {device.index}"),
        "graph_pool_handle": lambda: "pool",
        "Stream": Stream,
        "Event": Event,
        "stream": on,
        "graph": graph,
        "current_stream": current,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: said.append("replay")),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return SimpleNamespace(said=said, streams=streams)


class Tensor:
    """A tensor of the device that tells what is done to it."""

    is_cuda = True

    def __init__(self, said, streams):
        self.said, self.streams = said, streams

    def copy_(self, source, non_blocking):
        assert non_blocking
        self.said.append(f"copy on {self.streams[-1]}")

    def record_stream(self, stream):
        self.said.append(f"kept for {stream.name}")


def test_a_copy_beside_waits_for_what_was_queued_and_keeps_its_tensors(said):
    gpu = Gpu(CUDA)
    gpu.copy_beside(Tensor(said.said, said.streams), SimpleNamespace(is_cuda=False))
    beside = ["stream 1 waits for computing", "copy on stream 1", "moment on stream 1", "kept for stream 1"]
    assert said.said == ["device 1", *beside]


def test_a_copy_in_order_is_on_the_computing_stream(said):
    gpu = Gpu(CUDA)
    gpu.copy(Tensor(said.said, said.streams), None)
    gpu.moment()
    assert said.said == ["device 1", "copy on computing", "moment on computing"]


def test_a_graph_is_captured_after_two_calls_on_a_stream_of_their_own(said):
    gpu = Gpu(CUDA)
    replay = gpu.capture(lambda: said.said.append(f"compute on {said.streams[-1]}"))
    calls = ["compute on stream 2", "compute on stream 2", "computing waits for stream 2", "compute on graph"]
    assert said.said == ["device 1", "stream 2 waits for computing", *calls]
    replay()
    assert said.said[-1] == "replay"
