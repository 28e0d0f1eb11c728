"""What the runner asks of a GPU beside its kernels: memory that copies reach, copies, moments, and graphs.

Everything is queued; nothing here waits for the device. What computes is queued on one stream, in order, and copies
that need not be in order with it on another.
"""

from collections.abc import Callable
from typing import Protocol

import torch


class Moment(Protocol):
    """A place in the queue."""

    def query(self) -> bool:
        """Whether the device has done everything before it."""

    def synchronize(self) -> None:
        """Wait until it has."""


class Gpu:
    """A CUDA device."""

    def __init__(self, device: torch.device):
        self.device = device
        torch.cuda.set_device(device)
        self._beside = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def pinned(self, count: int) -> torch.Tensor:
        """So many bytes of the host's memory that copies reach directly. Freed, it is used again when they are done."""
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """target ← source, between pinned memory and the device, in order with what computes."""
        target.copy_(source, non_blocking=True)

    def moment(self) -> Moment:
        """The end of everything that was queued so far."""
        event = torch.cuda.Event()
        event.record()
        return event

    def copy_beside(self, target: torch.Tensor, source: torch.Tensor) -> Moment:
        """target ← source, after what was queued so far, beside what is queued from now on; returns when it is done."""
        self._beside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._beside):
            target.copy_(source, non_blocking=True)
            moment = self.moment()
        for tensor in (target, source):
            if tensor.is_cuda:
                tensor.record_stream(self._beside)
        return moment

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        """`compute` as a graph: what is returned queues the same kernels on the same tensors, by one call."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # what is done the first time only must not be captured
                compute()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process, such as those that watch over NCCL, may go on meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            compute()
        return graph.replay
