"""Two ranks of one core each beside one process with two threads: the same model, requests and time of day.

Each side's schedules are the best of their kind by its own measured profile, unbounded, with as many sequences decoded
at once in all on either side. Both sides take turns, so that a slow moment doesn't fall on one alone; of each schedule
the median run counts. Run it when the machine is quiet.

    python -m benchmarks.ranks
"""

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.job import measure_ranks, run_all
from exegpt.api.demo import create_demo_model
from xcore.console.schedule_text import schedule_text
from xcore.requests.requests import random_requests
from xcore.specs.model import ModelSpec
from xcore.specs.schedule import Schedule
from xprofiler import machine, store
from xprofiler.measure import measure_profile
from xscheduler.setting_search import search_schedule
from xscheduler.settings import Setting, find_setting
from xsimulator.replay.event_simulator import replay

RANKS = 2
KINDS = (
    *(({}, (policy,)) for policy in ("static", "orca", "chunked", "rra")),
    *(({"decode_iterations": few}, ("rra",)) for few in (12, 2)),
)
"""What is searched on either side: fixed variables and policies, of which the best is run. RRA's long phases encode
very large batches, which take longer than their profile predicts: short ones have their chance, too.
"""
STAGES = {"replicas": 1, "tp_degree": 1}
TOGETHER = (
    *(({"replicas": RANKS, **fixed}, policies) for fixed, policies in KINDS),
    (STAGES, ("rra",)),
    (STAGES, ("waa-c", "waa-m")),
)
"""For the ranks: replicas, a pipeline, and encoding and decoding disaggregated."""


Asked = tuple[tuple[dict[str, Any], tuple[str, ...]], ...]


def only(kinds: Asked, policies: str | None) -> Asked:
    """Those of some policies; None: all."""
    return tuple(kind for kind in kinds if policies is None or set(kind[1]) & set(policies.split(",")))


def best(setting: Setting, kinds: Asked, most: int) -> list[Schedule]:
    """The best schedule of each kind that is feasible, with up to `most` sequences at once on all replicas together."""
    schedules = []
    for fixed, policies in kinds:
        each = most // fixed.get("replicas", 1)
        answer = search_schedule(setting, None, policies=policies, fixed=fixed, most_resident=each)
        schedules += [answer.schedule] if answer.schedule else []
    return schedules


def main() -> None:
    """Run both sides and print the ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--most", type=int, default=128, help="sequences decoded at once, at most, in all")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--workload", default="S")
    parser.add_argument("--policy", help="only these of the policies, separated by commas")
    parser.add_argument("--dir", type=Path, default=Path("exegpt-demo"), help="where the demo's model is")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(RANKS)
    args.dir.mkdir(parents=True, exist_ok=True)
    directory = create_demo_model(args.dir, 0)
    spec = ModelSpec.from_directory(directory)
    if store.find(spec, "fp32", machine.provenance()) is None:
        measure_profile(directory)
    cluster, profile = measure_ranks(directory, RANKS)
    threads_setting = find_setting(str(directory), "local", args.workload, device="cpu")
    ranks_setting = find_setting(str(directory), str(cluster), args.workload, str(profile))
    drawn = threads_setting.workload.draw(args.requests, 0, spec.longest_request)
    rows = [replace(row, arrival_s=0.0) for row in drawn]
    requests = random_requests(rows, spec.vocab, 0)
    sides = (
        ("two threads", threads_setting, 1, best(threads_setting, only(KINDS, args.policy), args.most)),
        ("two ranks", ranks_setting, RANKS, best(ranks_setting, only(TOGETHER, args.policy), args.most)),
    )
    rates: dict[str, list[list[float]]] = {name: [] for name, *_ in sides}
    for _ in range(args.runs):
        for name, _, ranks, schedules in sides:
            runs = run_all(directory, schedules, requests, ranks, RANKS // ranks, profile.parent).runs
            rates[name].append([run.tokens_s for run in runs])
            print(name, *(f"{run.tokens_s:.0f}" for run in runs), file=sys.stderr)
    tops = []
    for name, setting, _, schedules in sides:
        medians = [statistics.median(mine) for mine in zip(*rates[name], strict=True)]
        tops.append(max(medians))
        for schedule, rate in zip(schedules, medians, strict=True):
            predicted = replay(schedule, setting.profile, rows, timeline=False).estimate.throughput_tok_s
            print(f"{name:12} {schedule_text(schedule):88} {rate:5.0f} tok/s, predicted {predicted:.0f}")
    print(f"{len(rows)} requests of {args.workload}, the median of {args.runs} runs", file=sys.stderr)
    print(f"best of two ranks / best of two threads: {tops[1] / tops[0]:.2f}")


if __name__ == "__main__":
    main()
