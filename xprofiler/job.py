"""A job's ranks as a cluster, and the profile that they measured.

Both are stored together, so that the next job with the same number of ranks plans with the same.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from xcore import document
from xcore.errors import InputError
from xcore.spec import Spec
from xcore.specs.cluster import ClusterSpec
from xcore.specs.model import ModelSpec
from xcore.specs.profile import Profile
from xprofiler import machine, store
from xprofiler.measure import MeasuredCluster, Progress, measure_job
from xprofiler.measured_cluster import found_cluster
from xprofiler.points import FEW, FULL, Points
from xrunner.comm import group_sum
from xrunner.comm.ranks import Ranks
from xrunner.models.device import CPU

_TIMES = 2
"""Maximum number of measurements on a busy machine."""


@dataclass(frozen=True)
class ProfilingJob(Spec):
    """A job's cluster, one device per rank, and its profile."""

    cluster: ClusterSpec
    profile: Profile


def measured_job(
    directory: Path,
    dtype: str,
    ranks: Ranks,
    device: torch.device = CPU,
    progress: Progress | None = None,
    attention: str = "triton",
    kv_dtype: str | None = None,
) -> ProfilingJob:
    """Return the stored measurement of an equal job, preferably at all points; else measure now, at few points.

    A measurement on a busy machine is repeated; if the machine is still busy, the calmer one is returned but not
    stored. All ranks call it alike, and all get the result.
    """
    spec = ModelSpec.from_directory(directory)
    kept = ranks.share(lambda: _kept(spec, dtype, ranks, device, attention, kv_dtype), ProfilingJob)
    if kept:
        return kept[0]
    jobs: list[ProfilingJob] = []
    while len(jobs) < _TIMES and not any(store.is_calm(job.profile) for job in jobs):
        measured = measure_job(
            directory, dtype, ranks, progress, device, FEW, attention=attention, kept=False, kv_dtype=kv_dtype
        )
        jobs.append(_job(measured, ranks, device))
    calmest = min(jobs, key=lambda job: job.profile.spread)
    if ranks.rank == 0 and store.is_calm(calmest.profile):
        keep(calmest, spec, ranks, device, FEW, attention)
    return ranks.share(lambda: calmest, ProfilingJob)


def _job(measured: MeasuredCluster, ranks: Ranks, device: torch.device) -> ProfilingJob:
    if ranks.size == 1:
        return ProfilingJob(machine.local(device), measured.profile)
    return ProfilingJob(found_cluster(ranks, measured.intra, measured.inter, device), measured.profile)


def keep(
    job: ProfilingJob, spec: ModelSpec, ranks: Ranks, device: torch.device, points: Points, attention: str = "triton"
) -> None:
    """Store what a job measured at these points."""
    if ranks.size == 1:
        facts = store.facts(device, points, attention=attention, kv_dtype=job.profile.kv_dtype)
        store.save(job.profile, spec, facts)
        return
    document.write(_path(spec, job.profile.dtype, ranks, device, points, attention, job.profile.kv_dtype), job)


def _path(
    spec: ModelSpec,
    dtype: str,
    ranks: Ranks,
    device: torch.device,
    points: Points,
    attention: str,
    kv_dtype: str | None = None,
) -> Path:
    facts = store.facts(device, points, attention=attention, kv_dtype=kv_dtype)
    facts |= {"ranks": f"{len(ranks.nodes)} nodes x {ranks.per_node}"}
    if not group_sum.wanted():
        facts["symmetric memory"] = "off"
    return store.path_for(spec, dtype, facts)


def _kept(
    spec: ModelSpec, dtype: str, ranks: Ranks, device: torch.device, attention: str, kv_dtype: str | None
) -> tuple[ProfilingJob, ...]:
    """Return the stored job, or nothing. A job of an older version counts as none."""
    if ranks.size == 1:
        profile = store.find_here(spec, dtype, device, attention, kv_dtype)
        return (ProfilingJob(machine.local(device), profile),) if profile else ()
    for path in (_path(spec, dtype, ranks, device, points, attention, kv_dtype) for points in (FULL, FEW)):
        try:
            if path.is_file():
                job = document.read(ProfilingJob, path)
                if store.is_usable(job.profile):
                    return (job,)
        except InputError:
            continue
    return ()
