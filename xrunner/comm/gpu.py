"""What the runner asks of a GPU beside its kernels: memory that copies reach, copies, moments, and graphs.

Everything is queued; nothing here waits for the device. What computes is queued on one stream, in order, and copies
that need not be in order with it on another.
"""

from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet

import torch

from exegpt.models.device import made_current


class Moment(Protocol):
    """A place in the queue."""

    def query(self) -> bool:
        """Whether the device has done everything before it."""

    def synchronize(self) -> None:
        """Wait until it has."""


class Gpu:
    """A CUDA device, the current one where it has no number; from now on it is the current one of this thread."""

    def __init__(self, device: torch.device):
        self.device = made_current(device)
        self._beside = torch.cuda.Stream(self.device)
        self.capturing = False
        """Whether a graph is being captured: until it is, nobody may ask whether a moment has come."""
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self.begin_graphs()

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

    def begin_graphs(self) -> None:
        """Let graphs that are captured from now on share their memory, with none from before: once all that shared some
        are gone, torch refuses to capture another one into it.
        """
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        """`compute` as a graph: what is returned queues the same kernels on the same tensors, by one call."""
        # What is done the first time only must not be captured. On the computing stream, since cuBLAS keeps memory for
        # every stream that it has been used on.
        for _ in range(2):
            compute()
        graph = torch.cuda.CUDAGraph()
        self._graphs.add(graph)
        self.capturing = True
        try:
            # Other threads of the process, such as those that watch over NCCL, may go on meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                compute()
        finally:
            self.capturing = False
        return graph.replay

    def drop_graphs(self) -> None:
        """End all graphs, whoever holds them still: an error's traceback, for one. NCCL's communicators wait for ever
        for graphs that hold their sums, so this comes before their end.
        """
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
