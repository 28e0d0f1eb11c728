"""Cells on the transports of GPUs, over the CPU's tensors: `staged` or `direct`. Run as the ranks of a job.

Each rank leaves `RANK.log`, a line for each of these, in order: when it began to send a tensor to another (`isend`) or
to receive one (`irecv`), with the other's rank, the communicator and the moment; when it dropped its graphs (`drop`),
having captured so many, and ended a communicator (`destroy`).
"""

import json
import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist

from xrunner.comm.direct import DirectTransport
from xrunner.comm.staged import StagedTransport
from xrunner.core import engine, job_setup

from .cells import run_cells
from .stand_in import StandIn

log = []
"""Empty while communicators are made, whose first messages meet in an order of their own."""


class Logging(StandIn):
    def drop_graphs(self):
        log.append(["drop", self.captured])
        super().drop_graphs()


class Waited(dist.Work):
    """A message of gloo's, which is only known to be done by those that wait for it: a thread does."""

    def __init__(self, work):
        super().__init__()
        self._work = work
        self._thread = threading.Thread(target=work.wait, daemon=True)
        self._thread.start()

    def is_completed(self):
        return not self._thread.is_alive()

    def wait(self):
        self._thread.join()


def staged(ranks, place, gpu):
    return StagedTransport(ranks, place.group, job_setup.KINDS, gpu)


def direct(ranks, place, gpu):
    before = len(log)
    transport = DirectTransport(ranks, place.schedule, place.schedule.model.spec, job_setup.KINDS, gpu, "gloo")
    del log[before:]
    return transport


def watched(name, call):
    def sent(tensor, other, group):
        log.append([name, other, group.group_name, time.perf_counter()])
        return Waited(call(tensor, other, group=group))

    return sent


def destroyed(call):
    def destroy(*group):
        log.append(["destroy"])
        call(*group)

    return destroy


def use(way):
    """Let engines of this process take a transport of GPUs."""
    for name in ("isend", "irecv"):
        setattr(dist, name, watched(name, getattr(dist, name)))
    dist.destroy_process_group = destroyed(dist.destroy_process_group)
    engine.gpu_of = lambda device: Logging()
    engine.make_transport = {"staged": staged, "direct": direct}[way]


def leave_log(folder, rank):
    (folder / f"{rank}.log").write_text("".join(json.dumps(line) + "\n" for line in log))


def read_log(folder, rank):
    return [json.loads(line) for line in (folder / f"{rank}.log").read_text().splitlines()]


if __name__ == "__main__":
    from mpi4py import MPI

    use(sys.argv[1])
    run_cells(Path(sys.argv[2]))
    leave_log(Path(sys.argv[2]), MPI.COMM_WORLD.rank)
