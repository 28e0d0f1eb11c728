"""`exegpt`, with something broken on one rank, named by the environment: FAULT=RANK:WHAT."""

import itertools
import os
import sys

from exegpt.cli import main
from xcore.frozen_heap import imports

with imports():
    from xrunner.core import capacity, job_setup
    from xrunner.rank import worker


def _raise_in_the_midst(after: int = 12) -> None:
    real, count = worker.Worker.run, itertools.count()

    def run(self, *args):
        if next(count) == after:
            raise RuntimeError("broken in the midst")
        return real(self, *args)

    worker.Worker.run = run  # type: ignore[method-assign]


def _no_memory_left_for_buffers() -> None:
    free = itertools.chain([2**50], itertools.repeat(0))
    capacity.free_memory = lambda device: next(free)  # type: ignore[attr-defined]


def _another_version() -> None:
    job_setup.__version__ = "0.0.1"  # type: ignore[attr-defined]


FAULTS = {"midst": _raise_in_the_midst, "memory": _no_memory_left_for_buffers, "version": _another_version}

if __name__ == "__main__":
    rank, what = os.environ["FAULT"].split(":")
    if os.environ.get("OMPI_COMM_WORLD_RANK") == rank:
        FAULTS[what]()
    sys.exit(main())
