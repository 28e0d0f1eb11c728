"""Direct transport: tensors go from GPU to GPU by NCCL, where every rank has its own GPU.

Orders, results and tokens still go by MPI. Each tag of tensors has its own communicator.
Within it, tensors between two ranks arrive in the order in which they were sent.
NCCL connects two ranks at their first exchange, and both block on it.
So every pair that will exchange tensors does so once at the start, in the same order on every rank.

An NCCL receive is a kernel that spins until its sender begins. Whatever synchronises with that GPU then waits for
another rank.
With all-reduces and graphs of several communicators, it waits for ever (NVIDIA/nccl#522, #783, #1766).
So the sender announces by MPI that it has begun. Only then is the receive posted.
"""

import atexit
import socket
from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist

from xcore.errors import InputError
from xcore.specs.model import ModelSpec
from xcore.specs.schedule import Schedule
from xrunner.comm.gpu import Gpu
from xrunner.comm.group_sum import GroupSum
from xrunner.comm.kv_transfer import routes
from xrunner.comm.place import Place
from xrunner.comm.ranks import Ranks
from xrunner.comm.transport import CACHE, STATES, TOKENS, Pending, Transport


@dataclass(eq=False)
class _Receive:
    """A receive in progress."""

    tensor: torch.Tensor
    source: int
    group: dist.ProcessGroup
    ready: Pending
    """The empty MPI message by which the sender announces that it has begun."""
    announced: "deque[_Receive]"
    """The receives of this source and tag that aren't posted yet, in order."""
    receive: dist.Work | None = None
    """The NCCL receive, posted after that."""

    def Test(self) -> bool:
        """Return whether it is complete."""
        while self.announced and self.announced[0].ready.Test():  # in order, whichever receive is polled
            first = self.announced.popleft()
            first.receive = dist.irecv(first.tensor, first.source, group=first.group)
        if self.receive is None or not self.receive.is_completed():
            return False
        self.receive.wait()  # orders later kernels after it; doesn't block the host
        return True


class DirectTransport(Transport):
    """One rank's direct transport; all ranks of the job construct it at once.

    `backend` is the torch.distributed backend that moves GPU tensors.

    Raises:
        InputError: The ranks can't be connected.
    """

    def __init__(
        self,
        ranks: Ranks,
        schedule: Schedule,
        spec: ModelSpec,
        kinds: tuple[type, ...],
        gpu: Gpu,
        backend: str = "nccl",
    ):
        super().__init__(ranks, (ranks.rank,), kinds, gpu)
        self._rank = ranks.rank
        places = [Place(schedule, rank) for rank in range(ranks.size)]
        self._leaving: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._coming: dict[tuple[int, int], deque[_Receive]] = {}
        """Announced receives that aren't posted yet, by source and tag, in order."""
        try:
            join(ranks, backend)
            # Runs before the communicators are destroyed (registered first): an error may have kept graphs alive.
            atexit.register(gpu.drop_graphs)
            self._communicators = {tag: dist.new_group(backend=backend) for tag in (STATES, CACHE)}
            groups = {ranks_: dist.new_group(ranks_, backend=backend) for ranks_ in sorted({p.group for p in places})}
            self._group_communicator = groups[places[ranks.rank].group]
            self._connect(pairs(places, spec), places[ranks.rank], gpu.device)
            self._sum = GroupSum(ranks, self._group_communicator, gpu.device)
        except RuntimeError as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise InputError(
                f"{backend} can't connect the ranks' devices ({first}): set EXEGPT_NCCL=0 to go through host memory."
            ) from error

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        """Start sending a contiguous tensor, which must not change from now on."""
        if tag == TOKENS:
            super().send(tensor, to, tag)
            return
        sending = dist.isend(tensor, to, group=self._communicators[tag])
        assert sending, "both ranks are of the communicator"
        self._leaving.append((sending, tensor))
        super().send(_empty(), to, tag)

    def expect(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        """Start receiving the next tensor from `source` into this one, of the same shape; poll `arrived`."""
        if tag == TOKENS:
            return super().expect(tensor, source, tag)
        announced, ready = self._coming.setdefault((source, tag), deque()), super().expect(_empty(), source, tag)
        receive = _Receive(tensor, source, self._communicators[tag], ready, announced)
        announced.append(receive)
        return receive

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of [rows, hidden] over the group; the sum is queued like a kernel."""
        return self._sum(x)

    def progress(self) -> None:
        """Advance the sends in progress and drop the completed ones."""
        while self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()
        super().progress()

    def close(self) -> None:
        """Complete all sends, drop all graphs and destroy the communicators.

        Nothing may be sent afterwards.
        """
        self.wait(lambda: not self._leaving)
        super().close()
        for group in (
            *self._communicators.values(),
            self._group_communicator,
        ):  # in the same order on every rank: destroying one blocks
            dist.destroy_process_group(group)

    def _connect(self, exchanges: list[tuple[int, int, int]], place: Place, device: torch.device) -> None:
        """Send once between every pair that will exchange tensors, in one order, and all-reduce once in every group."""
        token = torch.zeros(1, device=device)
        if dist.get_world_size(self._group_communicator) > 1:
            dist.all_reduce(token, group=self._group_communicator)
        for tag, source, target in exchanges:
            if place.rank in (source, target):
                exchange, peer = (dist.isend, target) if place.rank == source else (dist.irecv, source)
                work = exchange(token, peer, group=self._communicators[tag])
                assert work, "both ranks are of the communicator"
                work.wait()


def _empty() -> torch.Tensor:
    """Return the buffer of a message without content."""
    return torch.empty(0, dtype=torch.uint8)


def pairs(places: list[Place], spec: ModelSpec) -> list[tuple[int, int, int]]:
    """Return every exchange of tensors that a schedule has: (tag, source, target), sorted."""
    exchanges = {(STATES, place.before, place.rank) for place in places if place.before is not None}
    exchanges |= {(CACHE, place.encoded_by, place.rank) for place in places if place.encoded_by is not None}
    schedule = places[0].schedule
    if not spec.encoder_layers and schedule.stages[0].phase != "both":
        all_routes = [route for replica in range(schedule.replicas) for route in routes(schedule, replica, spec)]
        exchanges |= {(CACHE, route.source, route.target) for route in all_routes}
    return sorted(exchanges)


def join(ranks: Ranks, backend: str) -> None:
    """Initialise torch.distributed with the ranks of the job, once per process."""
    if dist.is_initialized():
        return
    one_node = len(ranks.nodes) == 1
    name = "127.0.0.1" if one_node else socket.gethostname()
    first = ranks.rank == 0
    store = dist.TCPStore(name, 0, ranks.size, is_master=True, wait_for_workers=False) if first else None
    host, port = ranks.all((name, store.port if store else 0))[0]
    store = store or dist.TCPStore(host, port, ranks.size, is_master=False, wait_for_workers=False)
    dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.size)
    atexit.register(dist.destroy_process_group)
