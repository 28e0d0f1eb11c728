"""How fast the event simulator goes: `python -m benchmarks.replay`.

The requests of a public conversation trace at their own arrival times, Llama-2-7B on one A100 from the roofline, one
core, the fastest of several runs after a small one that loads the compiled loops.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from exegpt.builtin_models import builtin_model
from exegpt.cluster import parse_cluster
from exegpt.schedule import ModelReference, ProfileReference, Schedule
from exegpt.trace import read_trace
from exegpt.workload import Workload
from xprofiler.roofline import roofline_profile
from xscheduler.allocation import uniform_stages
from xsimulator.cost.replica import CostModel
from xsimulator.cost.stage import StageCost
from xsimulator.replay.cells import DecodeSeconds
from xsimulator.replay.event_simulator import replay

DATA = Path(os.environ.get("EXEGPT_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
TRACE = DATA / "azure" / "AzureLLMInferenceTrace_conv.csv"

MODEL, CLUSTER = builtin_model("llama-2-7b"), parse_cluster("1xA100-80GB")
POLICIES: dict[str, dict[str, int]] = {
    "chunked": {"max_num_seqs": 256, "max_num_batched_tokens": 2048},
    "orca": {"max_num_seqs": 256, "prefills_per_step": 4},
    "rra": {"encode_batch": 8, "decode_batch": 64, "decode_iterations": 16},
    "static": {"encode_batch": 64},
}


def schedules(workload: Workload) -> tuple[list[Schedule], Any]:
    """A schedule of each policy with the blocks that memory holds, and their profile."""
    profile, stages = roofline_profile(MODEL, CLUSTER), uniform_stages(MODEL, CLUSTER, 1)
    blocks = CostModel(MODEL, CLUSTER, profile, "fp16").replica(stages).room((2048, 1))
    first = Schedule(
        version=Schedule.VERSION,
        policy="static",
        model=ModelReference(MODEL, MODEL.fingerprint),
        cluster=CLUSTER,
        workload=workload.without_requests,
        profile=ProfileReference(profile.source, profile.fingerprint),
        stages=stages,
        kv_blocks=blocks,
        dtype="fp16",
        kv_dtype="fp16",
        encode_batch=1,
    )
    schedules_by_policy = [
        replace(first, policy=name, **{"encode_batch": None, **variables}) for name, variables in POLICIES.items()
    ]  # type: ignore[arg-type]
    return schedules_by_policy, profile


def timed(owner: Any, name: str, spent: list[float]) -> Callable[[], None]:
    """Add the seconds of every call of a method to `spent[0]`; returns what undoes it."""
    method = getattr(owner, name)

    def measured(*arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(*arguments)
        finally:
            spent[0] += time.perf_counter() - began

    setattr(owner, name, measured)
    return lambda: setattr(owner, name, method)


def main() -> None:
    """Print requests per second by policy, and the share of the time that goes into asking tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="the fastest of so many runs")
    repeats = parser.parse_args().repeats
    if not TRACE.exists():
        sys.exit(f"skipped: there is no trace {TRACE} (EXEGPT_DATA)")
    requests = read_trace(str(TRACE))
    compared, profile = schedules(Workload.from_requests("conversation", requests))
    print(f"{len(requests)} requests, {MODEL.name}, {CLUSTER.name}, {compared[0].kv_blocks} KV blocks")
    print(f"{'policy':8} {'seconds':>8} {'requests/s':>11} {'simulated s':>12} {'in lookups':>11}")
    for schedule in compared:
        replay(schedule, profile, requests[:50], timeline=False)
        walls = []
        for _ in range(repeats):
            began = time.perf_counter()
            done = replay(schedule, profile, requests, timeline=False)
            walls.append(time.perf_counter() - began)
        spent = [0.0]
        undo = [timed(DecodeSeconds, "__call__", spent), timed(StageCost, "step", spent)]
        began = time.perf_counter()
        replay(schedule, profile, requests, timeline=False)
        share = spent[0] / (time.perf_counter() - began)
        for restore in undo:
            restore()
        wall = min(walls)
        print(f"{schedule.policy:8} {wall:8.2f} {len(requests) / wall:11,.0f} {done.seconds:12,.0f} {share:11.0%}")


if __name__ == "__main__":
    main()
