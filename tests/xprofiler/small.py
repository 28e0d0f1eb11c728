"""Measuring with few points: for tests in this process, and, run as a program, for the ranks of a test's job.

As a program it is `exegpt`, whose ranks can't pickle what they send each other. By environment: FAIL=RANK:TABLE ends
that rank by an exception at the table's first point, ALONE=1 gives every rank a node of its own, DIRECT=1 moves data as
between GPUs, with gloo in NCCL's place.
"""

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from xprofiler import attention_probe, collectives, links, machine, measure, points, store
from xrunner.comm import ranks


def shrink(put: Callable[[object, str, Any], None]) -> None:
    """Set few points, a pool that fits the CPU's caches, and short timings with `put`, a setattr."""
    tiny = {"tokens": (1, 4, 16), "prompts": (1, 4), "batches": (1, 4), "engine_batches": (1, 2)}
    tiny["other_bytes"] = (2**18, 2**20)
    full, few = replace(points.FULL, **tiny), replace(points.FEW, **tiny)
    put(points, "FULL", full)
    put(points, "FEW", few)
    for function in (measure.measure_profile, measure.measure_job):
        put(function, "__defaults__", (*function.__defaults__[:-1], full))  # type: ignore[index]
    put(store, "FULL", full)
    put(store, "FEW", few)
    put(store.facts, "__defaults__", (full,))
    put(measure, "timed", functools.partial(measure.timed, budget_s=0.0))
    put(attention_probe, "COLD_BYTES", 2**16)
    put(collectives, "_BYTES", (2**10, 2**16, 2**22))
    put(machine, "measured", functools.partial(_measured, machine.measured))


def _measured(real: Callable[..., Any], *given: Any) -> Any:
    machine.matrix_flops_s.__defaults__ = (64, None, None)
    machine.read_bandwidth_bytes_s.__defaults__ = (2**16, None)
    return real(*given)


def _fail(rank: int, table: str) -> None:
    real = measure.Recorder.record

    def record(self: Any, *args: Any) -> None:
        if args[0] == table and self._ranks.rank == rank:
            raise RuntimeError(f"broken at {table}")
        real(self, *args)

    measure.Recorder.record = record  # type: ignore[method-assign]


def _own_nodes(real: Any, world: Any, node: Any) -> Any:
    return real(world, world.Split(world.rank))


def _direct(ranks: Any, pairs: Any, device: Any) -> links.DirectLinks:
    class Clocked(links.DirectLinks):
        time = links.HostLinks.time

    return Clocked(ranks, pairs, device, "gloo")


def _refuse(*_: object) -> None:
    raise AssertionError("a message was pickled")


if __name__ == "__main__":
    from mpi4py import MPI

    from exegpt.cli import main

    MPI.pickle.__init__(_refuse, _refuse)  # type: ignore[misc]

    shrink(setattr)
    if "FAIL" in os.environ:
        rank, table = os.environ["FAIL"].split(":")
        _fail(int(rank), table)
    if "DIRECT" in os.environ:
        measure.make_links = _direct
    if "ALONE" in os.environ:
        ranks.Ranks = functools.partial(_own_nodes, ranks.Ranks)  # type: ignore[assignment, misc]
    sys.exit(main())
