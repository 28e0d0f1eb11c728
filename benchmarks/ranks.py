"""Two ranks of one core each beside one process with two threads: the same model, requests and run.

Each side's best schedules are searched with its own measured profile, unbounded, and run in turn; the median counts.
Run it when the machine is quiet.

    python -m benchmarks.ranks
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.fidelity import mpirun
from exegpt import document
from exegpt.cli.answer import schedule_text, search_schedule
from exegpt.cli.demo import create_demo_model
from exegpt.cli.inputs import Setting, find_setting
from exegpt.model import ModelSpec
from exegpt.models import load_model
from exegpt.schedule import Schedule
from exegpt.workload import RequestLengths
from xprofiler import machine, store
from xprofiler.measure import measure_profile
from xrunner.engine import Engine
from xrunner.requests import random_requests

RANKS = 2
ALONE, TOGETHER = ("static", "orca", "chunked", "rra"), ("rra", "waa-c", "waa-m")
"""Policies of one process, and of the ranks."""


def best(setting: Setting, policies: Sequence[str], most: int) -> list[Schedule]:
    """Each policy's best schedule with up to `most` sequences at once on a replica."""
    answer = search_schedule(setting, math.inf, policies=tuple(policies), most_resident=most)
    return [a.schedule for a in answer.alternatives if a.schedule]


def run_alone(directory: Path, schedules: Sequence[Schedule], rows: Sequence[RequestLengths], runs: int) -> list[float]:
    """Output tokens per second of each schedule in this process, the median run."""
    model = load_model(directory)
    requests = random_requests(rows, model.spec.vocab, 0)
    tokens = sum(row.output for row in rows)
    times: list[list[float]] = [[] for _ in schedules]
    for _ in range(runs):
        for mine, schedule in zip(times, schedules, strict=True):
            mine.append(Engine(model, schedule).run(requests).seconds)
    return [tokens / statistics.median(mine) for mine in times]


def run_together(
    directory: Path, made: Path, schedules: Sequence[Schedule], rows: Sequence[RequestLengths], runs: int
) -> list[float]:
    """The same of each schedule on the ranks of a job."""
    lines = "".join(f"{row.input},{row.output}\n" for row in rows)
    (made / "requests.csv").write_text("input,output\n" + lines, encoding="utf-8")
    files = ["--requests", made / "requests.csv", "--profile", made / "profile.json", "--repeats", runs]
    found = []
    for schedule in schedules:
        document.write(made / "schedule.json", schedule)
        given = ["--model", directory, "--schedule", made / "schedule.json", *files, "--json"]
        found.append(float(json.loads(mpirun(RANKS, "bench", *given))["policies"][0]["throughput_tok_s"]))
    return found


def main() -> None:
    """Run both sides and print the ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--most", type=int, default=64, help="sequences decoded at once, at most, by a replica")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--workload", default="S")
    parser.add_argument("--dir", type=Path, default=Path("exegpt-demo"), help="where the demo's model is")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(RANKS)
    args.dir.mkdir(parents=True, exist_ok=True)
    directory = create_demo_model(args.dir, 0)
    spec = ModelSpec.from_directory(directory)
    if store.find(spec, "fp32", machine.provenance()) is None:
        measure_profile(directory)
    made = args.dir / f"ranks-{RANKS}"
    made.mkdir(exist_ok=True)
    profile, cluster = made / "profile.json", made / "cluster.yaml"
    if not (profile.is_file() and cluster.is_file()):
        mpirun(RANKS, "profile", "--model", directory, "--out", profile, "--cluster-out", cluster)
    here = find_setting(str(directory), "local", args.workload)
    there = find_setting(str(directory), str(cluster), args.workload, str(profile))
    rows = [replace(row, arrival_s=0.0) for row in here.workload.draw(args.requests, 0, spec.context)]
    alone, together = best(here, ALONE, args.most), best(there, TOGETHER, args.most)
    rates = run_alone(directory, alone, rows, args.runs), run_together(directory, made, together, rows, args.runs)
    for name, schedules, found in (("two threads", alone, rates[0]), ("two ranks", together, rates[1])):
        for schedule, rate in zip(schedules, found, strict=True):
            print(f"{name:12} {schedule_text(schedule):90} {rate:7.0f} tok/s")
    print(f"{len(rows)} requests of {args.workload}, the median of {args.runs} runs", file=sys.stderr)
    print(f"best of two ranks / best of two threads: {max(rates[1]) / max(rates[0]):.2f}")


if __name__ == "__main__":
    main()
