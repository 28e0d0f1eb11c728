"""A profile in the store, so that engines of a test's model needn't measure: a busy machine does so three times."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from tests.xcore.small_specs import profile
from xcore.specs.cluster import local_cluster
from xcore.specs.model import ModelSpec


def store_profile(directory: Path, ranks: int = 1, kv_dtype: str | None = None) -> None:
    """Store a profile of plain lines for a model in fp32, as though so many ranks of this machine had measured it."""
    from xprofiler import store
    from xprofiler.job import ProfilingJob, keep
    from xprofiler.points import FEW
    from xrunner.models.device import CPU

    spec = ModelSpec.from_directory(directory)
    one = profile(spec)
    degrees = tuple(replace(degree, tp=tp) for degree in one.degrees for tp in range(1, ranks + 1) if ranks % tp == 0)
    made = replace(one, degrees=degrees, provenance=store.facts(CPU, FEW, kv_dtype=kv_dtype))
    cluster = replace(local_cluster(), devices_per_node=ranks)
    job = SimpleNamespace(size=ranks, nodes=(tuple(range(ranks)),), per_node=ranks)
    keep(ProfilingJob(cluster, made), spec, job, CPU, FEW)
