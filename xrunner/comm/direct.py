"""Direct transport: from one GPU to another by NCCL, where every rank has a GPU of its own.

Orders, results and tokens go by MPI as ever. Each kind of tensor has a communicator, within which tensors of two ranks
come in the order in which they were sent. All that will ever talk to each other do so once at the start, in one order
on every rank: NCCL connects two ranks when they first meet, and both wait for it.

A receive of NCCL's is a kernel that spins until its sender begins, and whatever on its GPU waits for the device then
waits for another rank: beside sums and graphs of several communicators, for ever (NVIDIA/nccl#522, #783, #1766). So the
sender says by MPI when it has begun, and only then is the receive posted.
"""

import atexit
import socket
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from exegpt.errors import InputError
from exegpt.schedule import Schedule
from xrunner.comm.gpu import Gpu
from xrunner.comm.kv_transfer import routes
from xrunner.comm.place import Place
from xrunner.comm.ranks import Ranks
from xrunner.comm.transport import CACHE, STATES, TOKENS, Transport


@dataclass(eq=False)
class _Coming:
    """A tensor on its way here."""

    tensor: torch.Tensor
    source: int
    tag: int
    ready: Any
    """The MPI message without content that says that its sender has begun."""
    receive: Any = None
    """NCCL's part, from then on."""


class DirectTransport(Transport):
    """The messages of one rank; all ranks of the job make it at once. `backend` is what moves tensors of the GPU.

    InputError where the ranks can't be connected.
    """

    def __init__(
        self,
        ranks: Ranks,
        schedule: Schedule,
        spec: Any,
        kinds: tuple[type, ...],
        gpu: Gpu,
        backend: str = "nccl",
    ):
        super().__init__(ranks, (ranks.rank,), kinds, gpu)
        self._rank = ranks.rank
        places = [Place(schedule, rank) for rank in range(ranks.size)]
        self._leaving: deque[tuple[Any, torch.Tensor]] = deque()
        self._coming: dict[tuple[int, int], deque[_Coming]] = {}
        """What isn't received yet, by source and tag, in order."""
        try:
            join(ranks, backend)
            # Before the communicators' own end, which was registered first: an error may have kept graphs alive.
            atexit.register(gpu.drop_graphs)
            self._ways = {tag: dist.new_group(backend=backend) for tag in (STATES, CACHE)}
            groups = {ranks_: dist.new_group(ranks_, backend=backend) for ranks_ in sorted({p.group for p in places})}
            self._sums = groups[places[ranks.rank].group]
            self._meet(pairs(places, spec), places[ranks.rank], gpu.device)
        except RuntimeError as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise InputError(
                f"{backend} can't connect the ranks' devices ({first}): set EXEGPT_NCCL=0 to go through host memory."
            ) from error

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        """Send a contiguous tensor, which must not change from now on."""
        if tag == TOKENS:
            super().send(tensor, to, tag)
            return
        self._leaving.append((dist.isend(tensor, to, group=self._ways[tag]), tensor))
        super().send(_nothing(), to, tag)

    def expect(self, tensor: torch.Tensor, source: int, tag: int) -> Any:
        """Let the next tensor from a rank be written into this one, which is of its shape; `arrived` tells when."""
        if tag == TOKENS:
            return super().expect(tensor, source, tag)
        coming = _Coming(tensor, source, tag, super().expect(_nothing(), source, tag))
        self._coming.setdefault((source, tag), deque()).append(coming)
        return coming

    def arrived(self, pending: Any) -> bool:
        """Whether it is there."""
        if not isinstance(pending, _Coming):
            return super().arrived(pending)
        line = self._coming[pending.source, pending.tag]
        while line and super().arrived(line[0].ready):  # in order, whichever of them is asked for
            first = line.popleft()
            first.receive = dist.irecv(first.tensor, first.source, group=self._ways[first.tag])
        if pending.receive is None or not pending.receive.is_completed():
            return False
        pending.receive.wait()  # what is queued from now on comes after it; the host doesn't wait
        return True

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of [rows, hidden] over the group, queued like a kernel."""
        self._go_on()
        if dist.get_world_size(self._sums) > 1:
            dist.all_reduce(x, group=self._sums)
        return x

    def progress(self) -> None:
        """Forget what has been sent."""
        while self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()
        super().progress()

    def close(self) -> None:
        """Wait until all that was sent has gone, and drop all graphs. Nothing may be sent afterwards."""
        self.wait(lambda: not self._leaving)
        super().close()
        for group in (*self._ways.values(), self._sums):  # in one order on every rank: they wait for each other
            dist.destroy_process_group(group)

    def _meet(self, met: list[tuple[int, int, int]], place: Place, device: torch.device) -> None:
        """Let all pairs that will ever send send once, in one order, and all groups sum once."""
        token = torch.zeros(1, device=device)
        if dist.get_world_size(self._sums) > 1:
            dist.all_reduce(token, group=self._sums)
        for tag, source, target in met:
            if place.rank == source:
                dist.isend(token, target, group=self._ways[tag]).wait()
            elif place.rank == target:
                dist.irecv(token, source, group=self._ways[tag]).wait()


def _nothing() -> torch.Tensor:
    """What a message without content is sent from, and written into."""
    return torch.empty(0, dtype=torch.uint8)


def pairs(places: list[Place], spec: Any) -> list[tuple[int, int, int]]:
    """Which tensors go from which rank to which, ever: (kind, source, target), in order."""
    found = {(STATES, place.before, place.rank) for place in places if place.before is not None}
    found |= {(CACHE, place.encoded_by, place.rank) for place in places if place.encoded_by is not None}
    schedule = places[0].schedule
    if not spec.encoder_layers and schedule.stages[0].phase != "both":
        every = [route for replica in range(schedule.replicas) for route in routes(schedule, replica, spec)]
        found |= {(CACHE, route.source, route.target) for route in every}
    return sorted(found)


def join(ranks: Ranks, backend: str) -> None:
    """Make the ranks of the job known to torch.distributed, once in a process."""
    if dist.is_initialized():
        return
    alone = len(ranks.nodes) == 1
    name = "127.0.0.1" if alone else socket.gethostname()
    first = ranks.rank == 0
    store = dist.TCPStore(name, 0, ranks.size, is_master=True, wait_for_workers=False) if first else None
    host, port = ranks.all((name, store.port if store else 0))[0]
    store = store or dist.TCPStore(host, port, ranks.size, is_master=False, wait_for_workers=False)
    dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.size)
    atexit.register(dist.destroy_process_group)
