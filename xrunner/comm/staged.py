"""Staged transport: a GPU's tensors through pinned host memory, which MPI reaches."""

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from xrunner.comm.gpu import Gpu, Moment
from xrunner.comm.ranks import Ranks
from xrunner.comm.transport import TOKENS, Transport, summed


@dataclass(eq=False)
class _Coming:
    """A tensor on its way to the device."""

    tensor: torch.Tensor
    host: torch.Tensor
    message: Any
    landed: Moment | None = None
    """When it is on the device, from its arrival on the host on."""


class StagedTransport(Transport):
    """Copies a tensor to the host beside what computes, then sends it; what comes is copied to the device likewise.
    Tokens stand on the host, and go as they are.
    """

    def __init__(self, ranks: Ranks, group: tuple[int, ...], kinds: tuple[type, ...], gpu: Gpu):
        super().__init__(ranks, group, kinds, gpu)
        self._gpu = gpu
        self._leaving: deque[tuple[Moment, torch.Tensor, int, int]] = deque()
        """Copies to the host, in order, with whom they are for."""

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        """Send a contiguous tensor, which must not change from now on."""
        if tag == TOKENS:
            super().send(tensor, to, tag)
            return
        host = self._like(tensor)
        self._leaving.append((self._gpu.copy_beside(host, tensor), host, to, tag))
        self.progress()

    def expect(self, tensor: torch.Tensor, source: int, tag: int) -> Any:
        """Let the next tensor from a rank be written into this one, which is of its shape; `arrived` tells when."""
        if tag == TOKENS:
            return super().expect(tensor, source, tag)
        host = self._like(tensor)
        return _Coming(tensor, host, super().expect(host, source, tag))

    def arrived(self, pending: Any) -> bool:
        """Whether it is there."""
        if not isinstance(pending, _Coming):
            return super().arrived(pending)
        if pending.landed is None and super().arrived(pending.message):
            pending.landed = self._gpu.copy_beside(pending.tensor, pending.host)
        return pending.landed is not None and pending.landed.query()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of [rows, hidden] over the group, made on the host."""
        self._go_on()
        if self._group is None:
            return x
        host = self._like(x)
        copied = self._gpu.copy_beside(host, x)
        self.wait(copied.query)
        host.copy_(summed(host, self._group, self._go_on))
        self._gpu.copy(x, host)
        return x

    def progress(self) -> None:
        """Send what has been copied, in order; move what is being sent, and forget what has been."""
        while self._leaving and self._leaving[0][0].query():
            _, host, to, tag = self._leaving.popleft()
            super().send(host, to, tag)
        super().progress()

    def close(self) -> None:
        """Wait until all that was sent has gone. Nothing may be sent afterwards."""
        self.wait(lambda: not self._leaving)
        super().close()

    def _like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pinned memory for a tensor of this shape."""
        return self._gpu.pinned(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
