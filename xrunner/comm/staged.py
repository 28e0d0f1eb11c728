"""Staged transport: a GPU's tensors go through pinned host memory, since MPI can't read a GPU's."""

from collections import deque
from dataclasses import dataclass

import torch

from xrunner.comm.gpu import DeviceEvent, Gpu
from xrunner.comm.ranks import Ranks
from xrunner.comm.transport import TOKENS, Pending, Transport, summed


@dataclass(eq=False)
class _Receive:
    """A receive in progress of a device tensor."""

    tensor: torch.Tensor
    host: torch.Tensor
    message: Pending
    gpu: Gpu
    landed: DeviceEvent | None = None
    """The copy to the device; None until the tensor has arrived on the host."""

    def Test(self) -> bool:
        """Return whether it is complete, on the device too."""
        if self.landed is None and self.message.Test():
            self.landed = self.gpu.copy_beside(self.tensor, self.host)
        return self.landed is not None and self.landed.query()


class StagedTransport(Transport):
    """One rank's staged transport.

    It copies a tensor to the host on a second stream, then sends it. Received tensors are copied to the device
    likewise.
    Tokens are on the host already.
    """

    def __init__(self, ranks: Ranks, group: tuple[int, ...], kinds: tuple[type, ...], gpu: Gpu):
        super().__init__(ranks, group, kinds, gpu)
        self._gpu = gpu
        self._leaving: deque[tuple[DeviceEvent, torch.Tensor, int, int]] = deque()
        """Copies to the host in order: (copy, host tensor, target rank, tag)."""

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        """Start sending a contiguous tensor, which must not change from now on."""
        if tag == TOKENS:
            super().send(tensor, to, tag)
            return
        host = self._like(tensor)
        self._leaving.append((self._gpu.copy_beside(host, tensor), host, to, tag))
        self.progress()

    def expect(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        """Start receiving the next tensor from `source` into this one, of the same shape; poll `arrived`."""
        if tag == TOKENS:
            return super().expect(tensor, source, tag)
        host = self._like(tensor)
        return _Receive(tensor, host, super().expect(host, source, tag), self._gpu)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of [rows, hidden] over the group, added on the host."""
        if self._group is None:
            return x
        host = self._like(x)
        copied = self._gpu.copy_beside(host, x)
        self.wait(copied.query)
        host.copy_(summed(host, self._group, self.progress))
        self._gpu.copy(x, host)
        return x

    def progress(self) -> None:
        """Send the tensors whose copies are complete, in order; advance the sends in progress."""
        while self._leaving and self._leaving[0][0].query():
            _, host, to, tag = self._leaving.popleft()
            super().send(host, to, tag)
        super().progress()

    def close(self) -> None:
        """Complete all sends and drop all graphs.

        Nothing may be sent afterwards.
        """
        self.wait(lambda: not self._leaving)
        super().close()

    def _like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return pinned memory for a tensor of this shape."""
        return self._gpu.pinned(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
