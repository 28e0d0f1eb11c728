"""Transport: what goes between the ranks of a job that run a model together.

Orders and results are small objects. Tensors (states, tokens, keys and values, sums over a tensor-parallel group) stand
in host memory and go as they are, by MPI. GPUs have classes like this one, whose tensors go another way: `staged.py`
through host memory, `direct.py` from GPU to GPU.

Nobody waits inside MPI, whose waiting keeps a processor busy: a rank looks whether something has come, lets others run
for a moment, then sleeps between two looks, and moves meanwhile what it is sending itself.
"""

import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from xrunner.comm.gpu import Gpu
from xrunner.comm.message import pack, unpack
from xrunner.comm.ranks import Ranks

ORDER, NOTICE, RESULT, STATES, TOKENS, CACHE, CHANGE = range(1, 8)
"""What a message is: each kind arrives in the order in which it was sent."""
_AWAKE_S = 2e-4
"""How long a rank that waits doesn't sleep: what comes at once shall not be late."""
_NAPS_S = 2e-5, 2e-4
"""The first sleep and the longest."""

Pending = Any
"""A message on its way here, into a tensor."""


class Transport:
    """The messages of one rank; `group` are the ranks of its tensor-parallel group, all of which make it at once.
    `kinds` are the dataclasses that may be sent as small objects; `gpu` is None where tensors are the processor's.
    """

    def __init__(self, ranks: Ranks, group: tuple[int, ...], kinds: tuple[type, ...] = (), gpu: Gpu | None = None):
        self.gpu = gpu
        self._world = ranks.world
        self._kinds = kinds
        self._group = None
        if len(group) > 1:
            self._group = self._world.Create_group(self._world.group.Incl(group))
        self._sending: deque[tuple[Any, object]] = deque()
        self.capturable = self._group is None
        """Whether a graph can hold its sums: nothing in them waits on the host."""
        self.meanwhile: Callable[[], object] | None = None
        """Called between the layers of an iteration, and while this rank waits."""

    def post(self, what: object, *to: int, tag: int = ORDER) -> None:
        """Send a small object to some ranks."""
        data = pack(what)
        for rank in to:
            self._sending.append((self._world.Isend(data, rank, tag), data))
        self.progress()

    def poll(self, source: int | None = None, tag: int = ORDER) -> Any:
        """The next object from a rank, or from any; None where none has come."""
        from mpi4py import MPI

        status = MPI.Status()
        message = self._world.Improbe(MPI.ANY_SOURCE if source is None else source, tag, status)
        if message is None:
            return None
        data = bytearray(status.Get_count(MPI.BYTE))
        message.Recv(data)
        return unpack(data, self._kinds)

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        """Send a contiguous tensor, which must not change from now on."""
        self._sending.append((self._world.Isend(_bytes(tensor), to, tag), tensor))

    def expect(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        """Let the next tensor from a rank be written into this one, which is of its shape; `arrived` tells when."""
        return self._world.Irecv(_bytes(tensor), source, tag)

    def arrived(self, pending: Pending) -> bool:
        """Whether it is there."""
        return bool(pending.Test())

    def wait(self, there: Callable[[], Any]) -> Any:
        """What `there` gives, as soon as that isn't None or False."""
        return wait(there, self._go_on)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> torch.Tensor:
        """The next tensor from a rank, written into this one."""
        pending = self.expect(tensor, source, tag)
        self.wait(lambda: self.arrived(pending))
        return tensor

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of [rows, hidden] over the group. Called between a layer's halves: a moment for other things too."""
        self._go_on()
        return x if self._group is None else summed(x, self._group, self._go_on)

    def progress(self) -> None:
        """Move what is being sent, and forget what has been."""
        for _ in range(len(self._sending)):
            entry = self._sending.popleft()
            if not entry[0].Test():
                self._sending.append(entry)

    def _go_on(self) -> None:
        if self.gpu and self.gpu.capturing:
            return  # what asks whether a moment has come would end the capture
        self.progress()
        if self.meanwhile:
            self.meanwhile()

    def close(self) -> None:
        """Wait until all that was sent has gone, and drop all graphs. Nothing may be sent afterwards."""
        self.wait(lambda: not self._sending)
        if self.gpu:
            self.gpu.drop_graphs()
        if self._group is not None:
            self._group.Free()
            self._group = None


def wait(there: Callable[[], Any], meanwhile: Callable[[], object] = lambda: None) -> Any:
    """What `there` gives, as soon as that isn't None or False; `meanwhile` is called between two looks."""
    began, (nap, longest) = time.perf_counter(), _NAPS_S
    while (found := there()) is None or found is False:
        meanwhile()
        if time.perf_counter() - began < _AWAKE_S:
            os.sched_yield()
        else:
            time.sleep(nap)
            nap = min(1.5 * nap, longest)
    return found


def summed(x: torch.Tensor, group: Any, meanwhile: Callable[[], object] = lambda: None) -> torch.Tensor:
    """The sum of a tensor over the ranks of a communicator, in float32, which MPI can add. May overwrite it."""
    from mpi4py import MPI

    wide = x.float().contiguous()
    pending = group.Iallreduce(MPI.IN_PLACE, wide.numpy())
    wait(pending.Test, meanwhile)
    return wide.to(x.dtype)


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.view(torch.uint8).numpy()
