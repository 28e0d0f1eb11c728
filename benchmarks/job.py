"""Schedules run by the ranks of a job, or by one process with several threads, one after the other: a program of its
own, so that both sides of a comparison are started, warmed up and measured alike.
"""

import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from xcore import document
from xcore.requests.request import Request, Result
from xcore.specs.request_times import RequestTimes
from xcore.specs.schedule import Schedule
from xcore.specs.timeline import Timeline


@dataclass(frozen=True)
class Run:
    """One run of the requests under one schedule."""

    seconds: float
    results: tuple[Result, ...]
    served: tuple[RequestTimes, ...]
    timeline: Timeline

    @property
    def tokens_s(self) -> float:
        """Output tokens per second."""
        return sum(request.output_tokens for request in self.served) / self.seconds


@dataclass(frozen=True)
class Done:
    """What a job gave: a run of each schedule."""

    runs: tuple[Run, ...]
    flops_s: float
    """Matrix products' FLOP/s in float32 of the median rank, while all of them multiply."""
    bytes_s: float
    """The same for reading."""


@dataclass(frozen=True)
class Asked:
    """What a job is to run."""

    model: str
    schedules: tuple[Schedule, ...]
    requests: tuple[Request, ...]
    threads: int
    """Of each rank."""
    device: str
    """`cpu` or `cuda`; ranks take the GPUs in turn."""


def mpirun(ranks: int, *arguments: object) -> str:
    """What `python ARGUMENTS` prints, run by so many ranks of this machine."""
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
    command = _mpirun()
    if not command:
        raise SystemExit("there is no mpirun: pip install 'exegpt[mpi]'")
    start = [command, "-n", str(ranks), sys.executable]
    done = subprocess.run([*start, *map(str, arguments)], stdout=subprocess.PIPE, text=True, env=os.environ | root)
    if done.returncode:
        raise SystemExit(done.returncode)
    return done.stdout


def _mpirun() -> str | None:
    return shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


def has_mpi() -> bool:
    """Whether jobs of several ranks can be run here."""
    return _mpirun() is not None and importlib.util.find_spec("mpi4py") is not None


def measure_ranks(directory: Path, ranks: int) -> tuple[Path, Path]:
    """The files of the cluster that so many ranks of this machine are and of the profile that they measured, beside the
    model's directory; measured once.
    """
    folder = directory.parent / f"ranks-{ranks}"
    folder.mkdir(exist_ok=True)
    cluster, profile = folder / "cluster.yaml", folder / "profile.json"
    if profile.is_file() and cluster.is_file():
        print(f"profile: {profile}, measured before; remove it to measure anew", file=sys.stderr)
    else:
        options = ["--model", directory, "--out", profile, "--cluster-out", cluster]
        mpirun(ranks, "-m", "exegpt", "profile", *options)
    return cluster, profile


def run_all(
    directory: Path,
    schedules: Sequence[Schedule],
    requests: Sequence[Request],
    ranks: int,
    threads: int,
    folder: Path,
    device: str = "cpu",
) -> Done:
    """One run of each schedule on so many ranks of so many threads; files in the folder `made`."""
    asked, done = folder / "asked.json", folder / "done.json"
    document.write(asked, Asked(str(directory), tuple(schedules), tuple(requests), threads, device))
    program = ["-m", "benchmarks.job", asked, done]
    if ranks > 1:
        mpirun(ranks, *program)
    else:
        subprocess.run([sys.executable, *map(str, program)], check=True)
    return document.read(Done, done)


def main(asked_file: str, done_file: str) -> None:
    """Run what is asked for on this rank; rank 0 writes what came of it."""
    import torch

    from xprofiler import machine
    from xrunner.comm.ranks import job
    from xrunner.core.engine import Engine
    from xrunner.models.device import find_device

    with job() as ranks:
        asked = document.read(Asked, asked_file)
        torch.set_num_threads(asked.threads)
        runs = []
        for schedule in asked.schedules:
            engine = Engine.load(asked.model, schedule, ranks, device=find_device(asked.device, ranks.local))
            report = engine.run(asked.requests)
            done = Run(report.seconds, tuple(report.results), report.served, report.timeline)
            runs += [run for run in ranks.gather(done if engine.leads else None, 0, Run) if run]
            engine.close()
        flops_s = statistics.median(ranks.all(machine.matrix_flops_s()))
        bytes_s = statistics.median(ranks.all(machine.read_bandwidth_bytes_s()))
        if ranks.rank == 0:
            document.write(done_file, Done(tuple(runs), flops_s, bytes_s))


if __name__ == "__main__":
    main(*sys.argv[1:])
