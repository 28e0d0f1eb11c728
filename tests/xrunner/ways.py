"""Cells on the transports of GPUs, over the processor's tensors: `staged` or `direct`. Run as the ranks of a job."""

import sys
import threading
from pathlib import Path

import torch.distributed as dist

from exegpt.models.device import PROCESSOR
from xrunner import engine
from xrunner.direct import DirectTransport
from xrunner.staged import StagedTransport

from .cells import run_cells
from .stand_in import StandIn


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
    return StagedTransport(ranks, place.group, engine.KINDS, gpu)


def direct(ranks, place, gpu):
    return DirectTransport(ranks, place.schedule, place.schedule.model.spec, engine.KINDS, PROCESSOR, "gloo")


if __name__ == "__main__":
    for name in ("isend", "irecv"):
        real = getattr(dist, name)
        setattr(dist, name, lambda *given, real=real, **options: Waited(real(*given, **options)))
    engine.gpu_of = lambda device: StandIn()
    engine.make_transport = {"staged": staged, "direct": direct}[sys.argv[1]]
    run_cells(Path(sys.argv[2]))
