"""The ranks of a job, grouped by node. Without a launcher such as mpirun, this process is a job of one rank.

Ranks that wait for others sleep: MPI's own waiting spins, and takes a processor and its memory bandwidth from what is
being measured. mpi4py is imported only where a launcher has started several ranks.
"""

import itertools
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from exegpt.errors import InputError
from xrunner.comm.message import pack, unpack

T = TypeVar("T")

_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""Where launchers say how many ranks they started."""
_NAPS_S = 1e-4, 2e-3
"""The first sleep of a rank that waits, and the longest: every one is twice as long as the one before."""
_BARRIERS = 9
BAD_INPUT, INTERRUPTED = 2, 130


class Agreed(InputError):
    """A bad input that every rank of the job knows of, so that all end alike and rank 0 says why."""


class Ranks:
    """The ranks of an MPI communicator `world`; `node` is the part of it on this node. Alone without them."""

    def __init__(self, world: Any = None, node: Any = None):
        self.world = world
        """The communicator; None for a rank that is alone."""
        self._node = node
        self.rank = world.rank if world else 0
        self.host = os.uname().nodename
        here = tuple(_counts(node, self.rank)) if node else (0,)
        self.nodes = tuple(sorted(set(self.all(here))))
        """The ranks of each node."""
        self.per_node = len(here)
        self.local = here.index(self.rank)
        """This rank's place on its node."""
        if len({len(ranks) for ranks in self.nodes}) > 1:
            counts = ", ".join(str(len(ranks)) for ranks in self.nodes)
            raise Agreed(f"The nodes have {counts} ranks: start as many on each, one per device.")

    @property
    def size(self) -> int:
        """How many ranks there are in all."""
        return self.per_node * len(self.nodes)

    def threads(self, asked: int | None = None) -> int | None:
        """Processor threads for each rank: as asked, else OMP_NUM_THREADS, else an equal share of the node's
        processors, as far as the rank may use them. Where it is alone, as asked: None is torch's own choice.

        InputError where the launcher has bound the rank to fewer processors.
        """
        if self.size == 1:
            return asked
        usable, given = len(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS", "")
        if asked is None and given.isdigit():
            asked = int(given)
        if asked is None:
            return max(1, min(usable, (os.cpu_count() or 1) // self.per_node))
        if asked > usable:
            raise InputError(
                f"A rank is to have {asked} threads (--threads or OMP_NUM_THREADS) and may use {usable} processors: "
                f"start with mpirun --bind-to none or --map-by slot:PE={asked}."
            )
        return asked

    def all(self, value: T, *kinds: type) -> list[T]:
        """Every rank's value, by rank, on every rank; all must call it.

        What goes between ranks are numbers, texts, arrays, dataclasses of these `kinds` and of their fields, and
        tuples, lists and dicts of all these. Tuples and lists come as tuples.
        """
        if self.world is None:
            return [value]
        data, sizes = self._sizes(value)
        heard = bytearray(sum(sizes))
        self.world.Allgatherv(data, [heard, sizes])
        return _values(heard, sizes, kinds)

    def gather(self, value: T, to: int, *kinds: type) -> list[T]:
        """Every rank's value, by rank, on rank `to`, nothing on the others; all must call it."""
        if self.world is None:
            return [value]
        data, sizes = self._sizes(value)
        heard = bytearray(sum(sizes) if self.rank == to else 0)
        self.world.Gatherv(data, [heard, sizes], to)
        return _values(heard, sizes, kinds) if self.rank == to else []

    def deal(self, values: list[T] | None, *kinds: type) -> T:
        """This rank's own of the values that rank 0 has for all of them; all must call it."""
        if self.world is None:
            assert values, "rank 0 has a value for itself"
            return values[0]
        parts = [pack(value) for value in values or ()]
        sizes = list(self.all([len(part) for part in parts])[0])
        mine = bytearray(sizes[self.rank])
        self.world.Scatterv([b"".join(parts), sizes], mine)
        dealt: T = unpack(mine, kinds)
        return dealt

    def clock(self) -> Callable[[], float]:
        """A clock that shows the same seconds on every rank at any moment; all must call it.

        On rank 0's node that is the system's own. On others the moments at which all leave a barrier are compared with
        rank 0's, several times over, since a rank may be late.
        """
        if self.world is None:
            return time.perf_counter
        self._wait(self.world.Ibarrier())
        moments = []
        for _ in range(_BARRIERS):
            self.world.Barrier()
            moments.append(time.perf_counter())
        ahead = statistics.median(mine - first for mine, first in zip(moments, self.all(moments)[0], strict=True))
        if any({0, self.rank} <= set(ranks) for ranks in self.nodes):
            return time.perf_counter
        return lambda: time.perf_counter() - ahead

    def group(self, size: int) -> Any:
        """The communicator of this rank's group of `size` neighbours on its node; None for a rank left over. All must
        call it.
        """
        group = self._node.Split(self.local // size)
        return group if group.size == size else None

    def between(self, other: int, first: bool) -> Callable[[Any], None]:
        """Sends a buffer to rank `other` and back if `first`, and the other way round if not."""

        def there_and_back(buffer: Any) -> None:
            for sends in (first, not first):
                if sends:
                    self.world.Send(buffer, other)
                else:
                    self.world.Recv(buffer, other)

        return there_and_back

    def agree(self, facts: Callable[[], dict[str, str]]) -> dict[str, str]:
        """This rank's facts, which must be those of every rank; Agreed, on all of them, where one differs or its facts
        raise an InputError.
        """
        try:
            mine, trouble = facts(), ""
        except InputError as error:
            mine, trouble = {}, str(error)
        heard = self.all((self.host, mine, trouble))
        for rank, (host, theirs, bad) in enumerate(heard):
            if bad:
                raise Agreed(bad if self.size == 1 else f"On rank {rank} ({host}): {bad}")
            for name, value in heard[0][1].items():
                if theirs[name] != value:
                    raise Agreed(
                        f"Rank {rank} ({host}) has {name} '{theirs[name]}' and rank 0 '{value}': start all ranks alike."
                    )
        return mine

    def share(self, make: Callable[[], T], *kinds: type) -> T:
        """What rank 0 makes, of `kinds` as in `all`, on every rank; Agreed, on all of them, where that raises an
        InputError.
        """
        made: list[T] = []

        def first() -> dict[str, str]:
            made.append(make())
            return {}

        self.agree(dict if self.rank else first)
        if self.world is None:
            return made[0]
        data = bytearray(pack(made[0]) if made else b"")
        size = self.all(len(data))[0]
        data = data if made else bytearray(size)
        self.world.Bcast(data)
        return made[0] if made else unpack(data, kinds)

    def _sizes(self, value: object) -> tuple[bytes, list[int]]:
        """A value as a message, and how many bytes every rank's has, once all have come here."""
        self._wait(self.world.Ibarrier())
        data = pack(value)
        return data, _counts(self.world, len(data))

    def _wait(self, request: Any) -> None:
        nap, longest = _NAPS_S
        while not request.Test():
            time.sleep(nap)
            nap = min(2 * nap, longest)


def _counts(world: Any, mine: int) -> list[int]:
    """A number of every rank of a communicator."""
    found = np.empty(world.size, dtype=np.int64)
    world.Allgather(np.array([mine], dtype=np.int64), found)
    counts: list[int] = found.tolist()
    return counts


def _values(heard: bytearray, sizes: list[int], kinds: tuple[type, ...]) -> list[Any]:
    """The messages of all ranks, which came one behind the other."""
    ends = list(itertools.accumulate(sizes))
    return [unpack(heard[end - size : end], kinds) for size, end in zip(sizes, ends, strict=True)]


@contextmanager
def job() -> Iterator[Ranks]:
    """The job that this process is a rank of. What one rank alone fails by ends the whole job, naming the rank."""
    started = next((int(os.environ[name]) for name in _SIZES if os.environ.get(name, "").isdigit()), 1)
    if started == 1:
        yield Ranks()
        return
    world = _world(started)
    try:
        yield Ranks(world, world.Split_type(_mpi().COMM_TYPE_SHARED))
    except Agreed:
        if world.rank:
            raise SystemExit(BAD_INPUT) from None
        raise
    except BaseException as error:
        if not isinstance(error, InputError | KeyboardInterrupt):
            traceback.print_exc()
        said = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error) or type(error).__name__
        sys.stderr.write(f"exegpt: rank {world.rank} ({os.uname().nodename}): {said}\n")
        sys.stderr.flush()
        code = (
            BAD_INPUT if isinstance(error, InputError) else INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        )
        world.Abort(code)


def _mpi() -> Any:
    from mpi4py import MPI

    return MPI


def _world(started: int) -> Any:
    """MPI's communicator of all ranks, which must be as many as were started."""
    try:
        world = _mpi().COMM_WORLD
    except (ImportError, RuntimeError) as error:  # no mpi4py, or no MPI library for it
        raise InputError(
            f"{started} ranks were started, and mpi4py can't be used ({error}): pip install 'exegpt[mpi]'."
        ) from None
    if world.size != started:
        raise InputError(
            f"{started} ranks were started, and MPI sees {world.size}: start them with the mpirun of the MPI library "
            f"that mpi4py uses, or with srun --mpi=pmix."
        )
    return world
