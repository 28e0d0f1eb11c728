"""The ranks of a job, grouped by node.

Without a launcher such as mpirun, this process is a job of one rank.

Waiting ranks sleep: blocking MPI calls spin, and take a CPU and its memory bandwidth from what is being measured.
mpi4py is imported only where a launcher has started several ranks.
"""

import itertools
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from xcore.child import end_with_parent
from xcore.errors import InputError
from xcore.requests.message import pack, unpack
from xcore.usable_cpus import cpu_ids, within_quota

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""Environment variables in which launchers give the number of started ranks."""
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""Environment variables in which launchers give a process its rank."""
_NAPS_S = 1e-4, 2e-3
"""The first and the longest sleep of a waiting rank, in seconds; each is twice as long as the one before."""
_BARRIERS = 9
BAD_INPUT, INTERRUPTED = 2, 130


class Agreed(InputError):
    """A bad input that is raised on every rank of the job, so that all end alike and rank 0 prints the reason."""


class Ranks:
    """The ranks of an MPI communicator `world`; `node` is the communicator of the ranks on this node.

    Without communicators, this process is the only rank.
    """

    def __init__(self, world: "MPI.Intracomm | None" = None, node: "MPI.Comm | None" = None):
        self.world = world
        """The communicator; None for a single rank."""
        self._node = node
        self.rank = world.rank if world else 0
        self.host = os.uname().nodename
        on_node = tuple(_counts(node, self.rank)) if node else (0,)
        bound = self.all((on_node, tuple(sorted(cpu_ids()))))
        self.nodes = tuple(sorted({ranks for ranks, _ in bound}))
        """The ranks of each node."""
        self._node_cpus = len({cpu for ranks, cpus in bound if ranks == on_node for cpu in cpus})
        """CPUs that this node's ranks may use together."""
        self.per_node = len(on_node)
        self.local = on_node.index(self.rank)
        """This rank's index on its node."""
        if len({len(ranks) for ranks in self.nodes}) > 1:
            counts = ", ".join(str(len(ranks)) for ranks in self.nodes)
            raise Agreed(f"The nodes have {counts} ranks: start the same number on each node, one per device.")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.per_node * len(self.nodes)

    def apart(self) -> "Ranks":
        """Return the same ranks with separate communicators, for another model's engine.

        Their messages are separate from the original's. All ranks must call it.
        """
        return Ranks(self.world.Dup(), self._node.Dup()) if self.world and self._node else self

    def threads(self, asked: int | None = None) -> int | None:
        """Return the number of CPU threads of this rank.

        The number is `asked`, else OMP_NUM_THREADS, else an equal share of the CPUs that the node's ranks may use
        together, at most the CPUs of this rank. For a single rank, it is `asked`, or None for torch's default.

        Raises:
            InputError: The launcher has bound the rank to fewer CPUs.
        """
        if self.size == 1:
            return asked
        usable, variable = len(cpu_ids()), os.environ.get("OMP_NUM_THREADS", "")
        if asked is None and variable.isdigit():
            asked = int(variable)
        if asked is None:
            return max(1, min(usable, within_quota(self._node_cpus) // self.per_node))
        if asked > usable:
            raise InputError(
                f"A rank needs {asked} CPUs for its threads (--threads or OMP_NUM_THREADS), but may use only {usable}: "
                f"start with mpirun --bind-to none or --map-by slot:PE={asked}."
            )
        return asked

    def all(self, value: T, *kinds: type) -> list[T]:
        """Return every rank's value, by rank, on every rank; all must call it.

        Values are numbers, strings, arrays, dataclasses of these `kinds` and of their fields, and tuples, lists and
        dicts of all these. Tuples and lists arrive as tuples.
        """
        if self.world is None:
            return [value]
        data, sizes = _sizes(self.world, value)
        received = bytearray(sum(sizes))
        self.world.Allgatherv(data, [received, sizes])
        return [unpack(part, kinds) for part in _parts(received, sizes)]

    def gather(self, value: T, to: int, *kinds: type) -> list[T]:
        """Return every rank's value, by rank, on rank `to`, and an empty list on the other ranks; all must call it."""
        if self.world is None:
            return [value]
        data, sizes = _sizes(self.world, value)
        received = bytearray(sum(sizes) if self.rank == to else 0)
        self.world.Gatherv(data, [received, sizes], to)
        return [unpack(part, kinds) for part in _parts(received, sizes)] if self.rank == to else []

    def deal(self, values: list[T] | None, *kinds: type) -> T:
        """Return this rank's item of the values that rank 0 has for all ranks; all must call it."""
        if self.world is None:
            assert values, "rank 0 has a value for itself"
            return values[0]
        parts = [pack(value) for value in values or ()]
        sizes = list(self.all([len(part) for part in parts])[0])
        mine = bytearray(sizes[self.rank])
        self.world.Scatterv([b"".join(parts), sizes], mine)
        value: T = unpack(mine, kinds)
        return value

    def clock(self) -> Callable[[], float]:
        """Return a clock in seconds that is the same on every rank; all must call it.

        On rank 0's node, this is the system's clock. On other nodes, it is shifted by the median difference between the
        times at which this rank and rank 0 leave several barriers.
        """
        if self.world is None:
            return time.perf_counter
        _wait(self.world.Ibarrier())
        times = []
        for _ in range(_BARRIERS):
            self.world.Barrier()
            times.append(time.perf_counter())
        ahead = statistics.median(mine - first for mine, first in zip(times, self.all(times)[0], strict=True))
        if any({0, self.rank} <= set(ranks) for ranks in self.nodes):
            return time.perf_counter
        return lambda: time.perf_counter() - ahead

    def group(self, size: int) -> "MPI.Comm | None":
        """Return the communicator of this rank's group of `size` neighbours on its node; all ranks must call it.

        Return None for a rank without a full group.
        """
        assert self._node, "a job of several ranks"
        group = self._node.Split(self.local // size)
        return group if group.size == size else None

    def between(self, other: int, first: bool) -> Callable[[NDArray[np.uint8]], None]:
        """Return a function that sends a buffer to rank `other` and back.

        Without `first`, the function receives the buffer and sends it back.
        """
        assert self.world, "a job of several ranks"
        send, receive = self.world.Send, self.world.Recv

        def there_and_back(buffer: NDArray[np.uint8]) -> None:
            for sends in (first, not first):
                if sends:
                    send(buffer, other)
                else:
                    receive(buffer, other)

        return there_and_back

    def agree(self, facts: Callable[[], dict[str, str]]) -> dict[str, str]:
        """Return this rank's facts, which must be the same on every rank.

        Raises:
            Agreed: On all ranks, if one fact differs or `facts` raises InputError on one rank.
        """
        try:
            mine, failure = facts(), ""
        except InputError as error:
            mine, failure = {}, str(error)
        received = self.all((self.host, mine, failure))
        for rank, (host, theirs, failed) in enumerate(received):
            if failed:
                raise Agreed(failed if self.size == 1 else f"On rank {rank} ({host}): {failed}")
            for name, value in received[0][1].items():
                if theirs[name] != value:
                    raise Agreed(
                        f"Rank {rank} ({host}) has {name} '{theirs[name]}' and rank 0 has '{value}': start all ranks "
                        "with the same arguments."
                    )
        return mine

    def attempt(self, make: Callable[[], T]) -> T:
        """Return what `make` returns on this rank.

        Raises:
            Agreed: On all ranks, if `make` raises InputError on one. The sentence names the rank unless all fail
                alike, as for one command line.
        """
        values, failure = [], ""
        try:
            values.append(make())
        except InputError as error:
            failure = str(error)
        failures = self.all((self.host, failure))
        for rank, (host, sentence) in enumerate(failures):
            if sentence:
                alike = all(other == sentence for _, other in failures)
                raise Agreed(sentence if alike else f"On rank {rank} ({host}): {sentence}")
        return values[0]

    def share(self, make: Callable[[], T], *kinds: type) -> T:
        """Return on every rank the value that `make` returns on rank 0, of `kinds` as in `all`.

        Raises:
            Agreed: On all ranks, if `make` raises InputError.
        """
        values: list[T] = []

        def first() -> dict[str, str]:
            values.append(make())
            return {}

        self.agree(dict if self.rank else first)
        if self.world is None:
            return values[0]
        data = bytearray(pack(values[0]) if values else b"")
        size = self.all(len(data))[0]
        data = data if values else bytearray(size)
        self.world.Bcast(data)
        return values[0] if values else unpack(data, kinds)


def _sizes(world: "MPI.Intracomm", value: object) -> tuple[bytes, list[int]]:
    """Return a value as a message and the bytes of every rank's message, once all ranks have called it."""
    _wait(world.Ibarrier())
    data = pack(value)
    return data, _counts(world, len(data))


def _wait(request: "MPI.Request") -> None:
    nap, longest = _NAPS_S
    while not request.Test():
        time.sleep(nap)
        nap = min(2 * nap, longest)


def _counts(world: "MPI.Comm", mine: int) -> list[int]:
    """Gather one number from every rank of a communicator."""
    gathered = np.empty(world.size, dtype=np.int64)
    world.Allgather(np.array([mine], dtype=np.int64), gathered)
    counts: list[int] = gathered.tolist()
    return counts


def _parts(received: bytearray, sizes: list[int]) -> list[bytearray]:
    """Return the messages of all ranks, which lie one after the other."""
    return [received[end - size : end] for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]


def ranks_started() -> int:
    """Return the number of ranks that the launcher started, including this process; 1 without a launcher."""
    return next((int(os.environ[name]) for name in _SIZES if os.environ.get(name, "").isdigit()), 1)


def rank_started() -> int:
    """Return this process's rank from the launcher's environment, before MPI is initialised; 0 without a launcher."""
    return next((int(os.environ[name]) for name in RANK_VARIABLES if os.environ.get(name, "").isdigit()), 0)


@contextmanager
def job() -> Iterator[Ranks]:
    """Yield the job of which this process is a rank.

    An error on one rank alone ends the whole job; its message names the rank. A rank ends with its launcher.
    """
    started = ranks_started()
    if started == 1:
        yield Ranks()
        return
    end_with_parent()  # a launcher that is killed leaves its ranks behind
    world = _world(started)
    try:
        from mpi4py import MPI

        yield Ranks(world, world.Split_type(MPI.COMM_TYPE_SHARED))
    except Agreed:
        if world.rank:
            raise SystemExit(BAD_INPUT) from None
        raise
    except BaseException as error:
        if not isinstance(error, InputError | KeyboardInterrupt):
            traceback.print_exc()
        reason = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error) or type(error).__name__
        sys.stderr.write(f"exegpt: rank {world.rank} ({os.uname().nodename}): {reason}\n")
        sys.stderr.flush()
        code = (
            BAD_INPUT if isinstance(error, InputError) else INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        )
        world.Abort(code)


def _world(started: int) -> "MPI.Intracomm":
    """Return MPI's communicator of all ranks.

    Raises:
        InputError: mpi4py can't be used, or MPI sees another number of ranks than were started.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # no mpi4py, or no MPI library for it
        raise InputError(
            f"{started} ranks were started, and mpi4py can't be used ({error}): pip install 'exegpt[mpi]'."
        ) from None
    world = MPI.COMM_WORLD
    if world.size != started:
        raise InputError(
            f"{started} ranks were started, and MPI sees {world.size}: start them with the mpirun of the MPI library "
            f"that mpi4py uses, or with srun --mpi=pmix."
        )
    return world
