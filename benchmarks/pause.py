"""How long nothing is computed where lengths drift and layers move: two ranks go on from a pipeline with encoding and
decoding apart, which takes the whole model on both. What the paper's Table 4 calls re-deploying.

    python -m benchmarks.pause
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.job import measure_ranks, mpirun
from exegpt.api.demo import create_demo_model
from xcore import document
from xcore.console.schedule_text import schedule_text
from xcore.requests.request import Request
from xcore.requests.requests import random_requests
from xcore.specs.schedule import Schedule
from xscheduler.setting_search import search_schedule
from xscheduler.settings import find_setting

RANKS = 2
WINDOW = 32
"""Requests that a drift is noticed by."""
BEFORE, AFTER = "16/8", "64/32"
"""Lengths (input/output) that requests begin with, and that they go on with."""
MEMORY_FRACTION = 0.05


@dataclass(frozen=True)
class Asked:
    """What a job is to run, from the first schedule to the second."""

    model: str
    schedules: tuple[Schedule, Schedule]
    requests: tuple[Request, ...]


def drift(asked_file: str) -> None:
    """Run on this rank; the leader in the end prints the change and what it is made of."""
    import torch

    from xrunner.comm.ranks import job
    from xrunner.core import drift
    from xrunner.core.changes import run_adapting
    from xrunner.core.engine import Engine

    torch.set_num_threads(1)
    drift.WINDOW = WINDOW
    asked = document.read(Asked, asked_file)
    with job() as ranks:
        engine = Engine.load(asked.model, asked.schedules[0], ranks)
        engine, report = run_adapting(engine, asked.model, asked.requests, lambda *_: asked.schedules[1])
        start = time.perf_counter()
        engine.close()
        Engine.load(asked.model, asked.schedules[1], ranks).close()
        loading = max(ranks.all(time.perf_counter() - start))
        if not engine.leads:
            return
        (change,) = report.changes
        assert change.moved and len(report.results) == len(asked.requests)
        print(f"{schedule_text(asked.schedules[0])} -> {schedule_text(asked.schedules[1])}")
        print(f"nothing computed for {change.pause_s:.2f} s; loading alone takes {loading:.2f} s")


def main() -> None:
    """Find both schedules, and let two ranks run them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--dir", type=Path, default=Path("exegpt-demo"), help="where the demo's model is")
    args = parser.parse_args()
    directory = create_demo_model(args.dir, 0)
    cluster, profile = measure_ranks(directory, RANKS)
    settings = [
        find_setting(str(directory), str(cluster), workload, str(profile), memory_fraction=MEMORY_FRACTION)
        for workload in (BEFORE, AFTER)
    ]
    stages = {"replicas": 1, "tp_degree": 1}
    plans = [
        search_schedule(setting, None, policies=policies, fixed=stages, most_resident=32).schedule
        for setting, policies in zip(settings, (("rra",), ("waa-c", "waa-m")), strict=True)
    ]
    if not (plans[0] and plans[1]):
        raise SystemExit("a schedule is missing")
    half, longest = args.requests // 2, settings[0].model.longest_request
    rows = [row for setting in settings for row in setting.workload.draw(half, 0, longest)]
    asked = Asked(str(directory), (plans[0], plans[1]), tuple(random_requests(rows, settings[0].model.vocab, 0)))
    document.write(profile.parent / "drift.json", asked)
    print(mpirun(RANKS, "-m", "benchmarks.pause", profile.parent / "drift.json"), end="")


if __name__ == "__main__":
    drift(sys.argv[1]) if sys.argv[1:] and not sys.argv[1].startswith("-") else main()
