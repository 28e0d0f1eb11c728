"""How fast the event simulator goes: `python -m benchmarks.replay`.

The requests of a public conversation trace at their own arrival times, Llama-2-7B on one A100 from the roofline, one
core, the fastest of several runs after a small one that loads the compiled loops. Then prompts of 2,048 tokens of which
nine tenths are one of ten prefixes, known by their tokens or by the prefix's name, in blocks of 16.
"""

import argparse
import functools
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from xcore.policies import TRAITS
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.schedule import ModelReference, ProfileReference, Schedule
from xcore.specs.workload import RequestLengths, Workload
from xcore.traces.prompt_identity import PromptIdentity
from xcore.traces.trace import read_trace
from xprofiler.roofline import roofline_profile
from xscheduler.allocation import uniform_stages
from xsimulator.cost.cost_model import CostModel
from xsimulator.cost.decode_cache import DecodeStepCache
from xsimulator.cost.stage import StageCost
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
        control=TRAITS["static"].control(**POLICIES["static"]),
        model=ModelReference(MODEL, MODEL.fingerprint),
        cluster=CLUSTER,
        workload=workload.without_requests,
        profile=ProfileReference(profile.source, profile.fingerprint),
        stages=stages,
        kv_blocks=blocks,
        dtype="fp16",
        kv_dtype="fp16",
    )
    schedules_by_policy = [
        replace(first, policy=name, control=TRAITS[name].control(**variables)) for name, variables in POLICIES.items()
    ]
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


def fastest(repeats: int, run: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of the fastest of several runs, and what the last gave."""
    walls, done = [], None
    for _ in range(repeats):
        began = time.perf_counter()
        done = run()
        walls.append(time.perf_counter() - began)
    return min(walls), done


def alike(count: int) -> tuple[list[RequestLengths], list[list[int]]]:
    """Draw requests of 2,048 tokens that share 1,856 with a tenth of the others, and their tokens."""
    rng = random.Random(0)
    prefixes = [[rng.randrange(100_000) for _ in range(1856)] for _ in range(10)]
    drawn = [rng.randrange(10) for _ in range(count)]
    requests = [
        RequestLengths(2048, rng.randrange(1, 256), i / 8, PromptIdentity(prefix=str(k), prefix_tokens=1856))
        for i, k in enumerate(drawn)
    ]
    return requests, [[*prefixes[k], *(rng.randrange(100_000) for _ in range(192))] for k in drawn]


def main() -> None:
    """Print requests per second by policy, in the Python lanes with the share of the time that goes into asking tables,
    and compiled; then of prompts that begin alike.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="the fastest of so many runs")
    repeats = parser.parse_args().repeats
    if not TRACE.exists():
        sys.exit(f"skipped: there is no trace {TRACE} (EXEGPT_DATA)")
    requests = read_trace(str(TRACE))
    compared, profile = schedules(Workload.from_requests("conversation", requests))
    print(f"{len(requests)} requests, {MODEL.name}, {CLUSTER.name}, {compared[0].kv_blocks} KV blocks")
    print(f"{'policy':8} {'compiled/s':>11} {'lanes/s':>11} {'simulated s':>12} {'in lookups':>11}")
    for schedule in compared:
        run = functools.partial(replay, schedule, profile, timeline=False)
        run(requests[:50], lanes=True)
        wall, done = fastest(repeats, functools.partial(run, requests, lanes=True))
        compiled, _ = fastest(repeats, functools.partial(run, requests))
        spent = [0.0]
        undo = [timed(DecodeStepCache, "__call__", spent), timed(StageCost, "step", spent)]
        share, _ = fastest(1, functools.partial(run, requests, lanes=True))
        for restore in undo:
            restore()
        rates = f"{len(requests) / compiled:11,.0f} {len(requests) / wall:11,.0f}"
        print(f"{schedule.policy:8} {rates} {done.seconds:12,.0f} {spent[0] / share:11.0%}")
    _print_prefixes(next(made for made in compared if made.policy == "chunked"), profile, repeats)


def _print_prefixes(chunked: Schedule, profile: Any, repeats: int) -> None:
    """Print requests per second of prompts that begin alike."""
    schedule = replace(chunked, admission="grow", prefix_caching=True)
    requests, prompts = alike(4000)
    few = 400
    for name, known, own in (("names", requests, None), ("tokens", requests, prompts)):
        run = functools.partial(replay, schedule, profile, timeline=False)
        compiled, done = fastest(repeats, functools.partial(run, known, prompts=own))
        some = own and own[:few]
        lanes, _ = fastest(1, functools.partial(run, known[:few], prompts=some, lanes=True))
        found = done.reused / sum(request.input for request in requests)
        rates = f"{len(requests) / compiled:,.0f} compiled, {few / lanes:,.0f} in the lanes"
        print(f"prompts known by their {name}, {found:.0%} found in the cache: {rates}, requests/s")


if __name__ == "__main__":
    main()
