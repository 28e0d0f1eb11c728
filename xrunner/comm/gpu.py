"""The runner's use of a GPU apart from its kernels: pinned memory, copies, events and graphs.

Everything is queued; no call waits for the device. Kernels are queued on one stream.
Copies that need not be in order with the kernels are queued on a second stream.
"""

from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet

import torch

from xrunner.models.device import made_current


class DeviceEvent(Protocol):
    """An event in a stream."""

    def query(self) -> bool:
        """Return whether all work before the event is complete."""

    def synchronize(self) -> None:
        """Wait until all work before the event is complete."""


class Gpu:
    """A CUDA device: the current one if `device` has no number. It becomes the current device of this thread."""

    def __init__(self, device: torch.device):
        self.device = made_current(device)
        self._copy_stream = torch.cuda.Stream(self.device)
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self.begin_graphs()

    def pinned(self, count: int) -> torch.Tensor:
        """Return `count` bytes of pinned host memory.

        Once freed, the memory is reused only after the copies from it are complete.
        """
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source` to `target`, between pinned memory and the device, in order with the kernels."""
        target.copy_(source, non_blocking=True)

    def moment(self) -> DeviceEvent:
        """Return an event after everything queued so far."""
        event = torch.cuda.Event()
        event.record()
        return event

    def copy_beside(self, target: torch.Tensor, source: torch.Tensor) -> DeviceEvent:
        """Copy `source` to `target` on the second stream, after everything queued so far.

        Returns the event of the copy's end.
        """
        self._copy_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copy_stream):
            target.copy_(source, non_blocking=True)
            moment = self.moment()
        for tensor in (target, source):
            if tensor.is_cuda:
                tensor.record_stream(self._copy_stream)
        return moment

    def begin_graphs(self) -> None:
        """Let graphs captured from now on share a new memory pool.

        torch refuses to capture into a pool whose graphs are all gone.
        """
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, compute: Callable[[], object]) -> Callable[[], None]:
        """Capture `compute` as a graph; the returned function queues the same kernels on the same tensors."""
        # Work of first calls only must not be captured. Run on the computing stream: cuBLAS keeps memory for every
        # stream that it has been used on.
        for _ in range(2):
            compute()
        graph = torch.cuda.CUDAGraph()
        self._graphs.add(graph)
        # A stream on a share of the multiprocessors captures itself: the kernels keep to them. The default one can't.
        stream = torch.cuda.current_stream(self.device)
        own = None if stream == torch.cuda.default_stream(self.device) else stream
        # Other threads of the process, such as NCCL's watchdog, may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=own, capture_error_mode="thread_local"):
            compute()
        graph.replay()  # the first launch takes milliseconds more
        return graph.replay

    def drop_graphs(self) -> None:
        """Reset all graphs, including graphs that are still referenced, for example by an error's traceback.

        Destroying an NCCL communicator waits for ever for graphs that captured its all-reduces, so this comes first.
        """
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
