"""Transport: messages between the ranks of a job.

Orders and results are small objects. Tensors (states, tokens, keys and values, sums over a tensor-parallel group) are
in host memory and sent from there by MPI. For GPUs there are two subclasses: `staged.py` sends tensors through pinned
host memory, `direct.py` from GPU to GPU.

There are no blocking MPI calls: they spin and keep a CPU busy. A rank polls, yields, then sleeps between polls.
Meanwhile it completes its sends.
"""

import os
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from xcore.requests.message import pack, unpack
from xrunner.comm.gpu import Gpu
from xrunner.comm.ranks import Ranks

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

ORDER, NOTICE, RESULT, STATES, TOKENS, CACHE, CHANGE, REQUEST, SPANS = range(1, 10)
"""Message tags; messages of one tag arrive in the order in which they were sent."""
_AWAKE_S = 2e-4
"""Seconds of polling without sleep: most messages have arrived by then."""
_NAPS_S = 2e-5, 2e-4
"""The first and the longest sleep, in seconds."""


class Pending(Protocol):
    """A receive in progress."""

    def Test(self) -> bool:
        """Return whether it is complete; named as in mpi4py, whose requests are such receives."""


"""A receive in progress, into a tensor."""


class Transport:
    """One rank's sends and receives.

    `group` are the ranks of its tensor-parallel group, all of which construct it at once. `kinds` are the dataclasses
    that may be sent as small objects. `gpu` is None if tensors are on the CPU.
    """

    def __init__(self, ranks: Ranks, group: tuple[int, ...], kinds: tuple[type, ...] = (), gpu: Gpu | None = None):
        self.gpu = gpu
        assert ranks.world, "a job of several ranks"
        self._world = ranks.world
        self._kinds = kinds
        self._group = None
        if len(group) > 1:
            self._group = self._world.Create_group(self._world.group.Incl(group))
        self._sending: deque[tuple[Pending, object]] = deque()
        self.capturable = self._group is None
        """Whether CUDA graphs can capture its all-reduces: none of them waits on the host."""

    def post(self, message: object, *to: int, tag: int = ORDER) -> None:
        """Send a small object to these ranks."""
        data = pack(message)
        for rank in to:
            self._sending.append((self._world.Isend(data, rank, tag), data))
        self.progress()

    def poll(self, source: int | None = None, tag: int = ORDER) -> Any:
        """Return the next object from `source`, or from any rank if None; None if no message has arrived."""
        from mpi4py import MPI

        status = MPI.Status()
        message = self._world.Improbe(MPI.ANY_SOURCE if source is None else source, tag, status)
        if message is None:
            return None
        data = bytearray(status.Get_count(MPI.BYTE))
        message.Recv(data)
        return unpack(data, self._kinds)

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        """Start sending a contiguous tensor, which must not change from now on."""
        self._sending.append((self._world.Isend(_bytes(tensor), to, tag), tensor))

    def expect(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        """Start receiving the next tensor from `source` into this one, of the same shape; poll `arrived`."""
        return self._world.Irecv(_bytes(tensor), source, tag)

    def arrived(self, pending: Pending) -> bool:
        """Return whether a receive is complete."""
        return bool(pending.Test())

    def wait(self, poll: Callable[[], T | None], between: Callable[[], object] = lambda: None) -> T:
        """Call `poll` until it returns neither None nor False, and return that.

        `between` is called between two polls.
        """

        def advance() -> None:
            self.progress()
            between()

        return wait(poll, advance)

    def receive(
        self, tensor: torch.Tensor, source: int, tag: int, between: Callable[[], object] = lambda: None
    ) -> torch.Tensor:
        """Receive the next tensor from `source` into this one, and return it; `between` as in `wait`."""
        pending = self.expect(tensor, source, tag)
        self.wait(lambda: self.arrived(pending), between)
        return tensor

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of [rows, hidden] over the group."""
        return x if self._group is None else summed(x, self._group, self.progress)

    def progress(self) -> None:
        """Advance the sends in progress and drop the completed ones."""
        for _ in range(len(self._sending)):
            entry = self._sending.popleft()
            if not entry[0].Test():
                self._sending.append(entry)

    def close(self) -> None:
        """Complete all sends and drop all graphs.

        Nothing may be sent afterwards.
        """
        self.wait(lambda: not self._sending)
        if self.gpu:
            self.gpu.drop_graphs()
        if self._group is not None:
            self._group.Free()
            self._group = None


def wait(poll: Callable[[], T | None], between: Callable[[], object] = lambda: None) -> T:
    """Call `poll` until it returns neither None nor False, and return that.

    `between` is called between two polls.
    """
    began, (nap, longest) = time.perf_counter(), _NAPS_S
    while (result := poll()) is None or result is False:
        between()
        if time.perf_counter() - began < _AWAKE_S:
            os.sched_yield()
        else:
            time.sleep(nap)
            nap = min(1.5 * nap, longest)
    return result


def summed(x: torch.Tensor, group: "MPI.Comm", between: Callable[[], object] = lambda: None) -> torch.Tensor:
    """Return the sum of a tensor over the ranks of a communicator. May overwrite x.

    The sum is computed in float32, as MPI lacks 16-bit floats.
    """
    from mpi4py import MPI

    wide = x.float().contiguous()
    pending = group.Iallreduce(MPI.IN_PLACE, wide.numpy())
    wait(pending.Test, between)
    return wide.to(x.dtype)


def _bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    return tensor.view(torch.uint8).numpy()
