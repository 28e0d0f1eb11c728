"""What `tune --rate` finds beside a dense grid of schedules, both asked in the same simulator with the same requests.

For each of the questions below (three models, two clusters, two workloads, two sets of bounds; and some more kept
aside, `--aside`): the goodput that the search finds over the best of the grid; whether every policy's schedule that it
calls sustained keeps the bounds on three fresh seeds at 98 % of its goodput; how far seeds 0, 1 and 2 are from each
other (`--seeds`); and what grid and search cost. Answers are appended to --out, and those in it are not asked
again.

The grid: batches in steps of 1.15, token budgets of 1.25, N_D of 1.25, every number of prompts a step, on every
allocation. A schedule whose steady throughput, with a margin, is below the best goodput so far is not replayed.

    python -m benchmarks.goodput --out goodput.jsonl
    python -m benchmarks.goodput --questions 1,5-8 --grid-policies chunked,orca
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.schedule import Schedule
from xcore.specs.workload import Workload, task
from xprofiler.roofline import roofline_profile
from xscheduler.candidates import Candidates
from xscheduler.goodput import BEYOND, PRECISION, Meter, RateBounds
from xscheduler.open_search import OpenSearch
from xscheduler.open_tune import Rated, tune_at
from xscheduler.rate_sample import REQUESTS, Arrivals
from xscheduler.search_problem import Limits, SearchProblem
from xscheduler.spaces import POLICIES, spaces
from xsimulator.cost.cost_model import CostModel
from xsimulator.steady.load import Load

BATCH, OTHER = 1.15, 1.25
"""Ratios of the grid's neighbouring values: of batches, and of the other variable."""
SCREEN = 20_000
"""Requests with which a schedule of the grid is asked first."""
FRESH = (101, 102, 103)
SHARE = 0.98


@dataclass(frozen=True)
class Asked:
    """One question."""

    model: str
    cluster: str
    workload: str
    bounds: RateBounds


def _bounds(latency: float, ttft: float, tpot: float) -> tuple[RateBounds, RateBounds]:
    """Of a chat, and of a batch of documents, which has a bound on the latency alone."""
    return RateBounds(latency, ttft, tpot), RateBounds(latency)


QUESTIONS = tuple(
    Asked(model, cluster, workload, bounds)
    for model, clusters in (
        ("llama-3.1-8b", ("1xH100-SXM", "4xA100-80GB")),
        ("opt-13b", ("1xH100-SXM", "4xA100-80GB")),
        ("llama-3.1-70b", ("4xH100-SXM", "8xA100-80GB")),
    )
    for cluster in clusters
    for workload, bounds_pair in (("2048/256", _bounds(12.0, 0.6, 0.04)), ("T", _bounds(8.0, 0.25, 0.03)))
    for bounds in bounds_pair
    if (model, workload) != ("opt-13b", "2048/256")
) + tuple(
    Asked("opt-13b", cluster, "C1", bounds)  # its context holds no 2048/256
    for cluster in ("1xH100-SXM", "4xA100-80GB")
    for bounds in _bounds(8.0, 0.4, 0.04)
)
ASIDE = (
    Asked("llama-3.1-8b", "1xH100-SXM", "2048/256", RateBounds(5.0, 0.2, 0.02)),
    Asked("llama-3.1-8b", "2xL40S", "C2", RateBounds(30.0, 0.8, 0.05)),
    Asked("opt-30b", "2xH100-SXM", "S", RateBounds(4.0, 0.3)),
    Asked("llama-3.1-70b", "8xH100-SXM", "1024/128", RateBounds(6.0, 0.3, 0.03)),
)
"""Looked at once, when nothing was left to be chosen."""


def setting(question: Asked, seed: int) -> dict[str, Any]:
    """What `tune_at` is asked with."""
    model, cluster = builtin_model(question.model), parse_cluster(question.cluster)
    lengths = question.workload.split("/")
    workload = Workload.fixed(int(lengths[0]), int(lengths[1])) if len(lengths) == 2 else task(question.workload)
    return {
        "model": model,
        "cluster": cluster,
        "workload": workload,
        "profile": roofline_profile(model, cluster),
        "arrivals": Arrivals.poisson(workload, model.longest_request, seed, cluster.devices),
        "bounds": question.bounds,
    }


def thinned(values: Sequence[int], ratio: float) -> list[int]:
    """Places of values about `ratio` apart, both ends among them."""
    places = sorted(range(len(values)), key=values.__getitem__)
    thinned_places = [places[0]]
    for place in places:
        if values[place] >= ratio * values[thinned_places[-1]] or (place == places[-1] and place != thinned_places[-1]):
            thinned_places.append(place)
    return thinned_places


class Grid:
    """Every schedule of a dense grid, by falling ceilings of their spaces."""

    def __init__(self, arguments: dict[str, Any], policies: Sequence[str]):
        self.meter = Meter(arguments["profile"], arguments["arrivals"], arguments["bounds"])
        profile = arguments["profile"]
        cost_model = CostModel(arguments["model"], arguments["cluster"], profile, profile.dtype, watched=False)
        load = Load(arguments["workload"], arguments["model"].encoder_layers > 0)
        self.problem = SearchProblem(cost_model, load, Limits(arguments["bounds"].latency_s), {}, open_system=True)
        self.policies = policies
        self.points, self.best, self.schedule = 0, 0.0, None

    def run(self, known: float) -> None:
        """The best schedule of the grid, of those above 98 % of `known` requests/s."""
        self.best = 0.98 * known
        for policy in self.policies:
            search = OpenSearch(self.problem, spaces(policy, self.problem), self.meter)
            for space in search._by_ceiling():
                if search._rate(space.ceiling) * BEYOND <= self.best:
                    break
                for point in self._points(search, space):
                    self._ask(search, space, point)

    def _points(self, search: OpenSearch, space: Candidates) -> Iterator[tuple[int, ...]]:
        batches, *others = (thinned(v.values, BATCH if i == 0 else OTHER) for i, v in enumerate(space.variables))
        for rest in itertools.product(*others):
            top = search._largest(space, tuple(rest))
            for batch in sorted({top, *(b for b in batches if b < top)}, reverse=True) if top is not None else ():
                self.points += 1
                if search._steady(space, (batch, *rest)) * BEYOND <= self.best:
                    break  # throughput rises with the batch: nothing below can be better
                yield batch, *rest

    def _ask(self, search: OpenSearch, space: Candidates, point: tuple[int, ...]) -> None:
        schedule, steady = search.schedule(space, point), search._steady(space, point)
        above = self.best * (1 + PRECISION)
        # a quick look with some slack, then all requests
        if not self.meter.holds(schedule, above * 0.95, SCREEN) or not self.meter.holds(schedule, above):
            return
        if self.meter.excess(schedule, above).likely <= 0:
            self.best, self.schedule = self.meter.goodput(schedule, steady, REQUESTS, above).low, schedule


def fresh(rated: Rated, question: Asked) -> dict[str, Any]:
    """Every policy's schedule at 98 % of its goodput, on seeds that the search didn't use: how many break a bound."""
    broken = checks = 0
    for seed in FRESH:
        arguments = setting(question, seed)
        meter = Meter(arguments["profile"], arguments["arrivals"], question.bounds)
        for sustained in rated.sustained.values():
            if sustained.goodput_seq_s:
                checks += 1
                broken += (
                    meter.bounds.broken(meter.served_at(sustained.schedule, SHARE * sustained.goodput_seq_s)) != ""
                )
    return {"checks": checks, "broken": broken}


def variables(schedule: Schedule | None) -> dict[str, int]:
    """What a schedule's policy chose."""
    if schedule is None:
        return {}
    degree = schedule.tensor_parallelism["tp_degree"]
    return {
        name: value
        for name, value in {**schedule.control.decisions, "tp_degree": degree, "replicas": schedule.replicas}.items()
        if value
    }


def answer(question: Asked, seeds: int, grid_policies: Sequence[str]) -> dict[str, Any]:
    """Everything about one question."""
    reached, seconds, first = [], [], None
    for seed in range(seeds):
        arguments = setting(question, seed)
        began, cpu = time.perf_counter(), time.process_time()
        names = ("model", "cluster", "workload", "profile", "arrivals")
        rated = tune_at(*(arguments[name] for name in names), question.bounds, 1e-3)
        seconds.append((time.perf_counter() - began, time.process_time() - cpu))
        reached.append(rated.highest_rate_seq_s)
        first = first or rated
    assert first is not None
    best = max(first.sustained.values(), key=lambda sustained: sustained.goodput_seq_s, default=None)
    row: dict[str, Any] = {
        "question": f"{question.model} {question.cluster} {question.workload} {vars(question.bounds)}",
        "goodput": reached,
        "spread": max(reached) / min(reached) - 1 if min(reached) else None,
        "seconds": [round(wall, 2) for wall, _ in seconds],
        "cpu_seconds": [round(cpu, 2) for _, cpu in seconds],
        "replays": first.tuned.search.replays,
        "policy": best.schedule.policy if best else None,
        "chosen": variables(best.schedule if best else None),
        **fresh(first, question),
    }
    if grid_policies:
        began, grid = time.process_time(), Grid(setting(question, 0), grid_policies)
        grid.run(reached[0])
        row |= {
            "grid": grid.best if grid.schedule else None,
            "grid_policy": grid.schedule.policy if grid.schedule else None,
            "grid_chosen": variables(grid.schedule),
            "ratio": reached[0] / grid.best if grid.schedule else 1.0,
            "grid_points": grid.points,
            "grid_replays": grid.meter.replays,
            "grid_cpu_seconds": round(time.process_time() - began, 1),
        }
    return row


def numbers(text: str, most: int) -> list[int]:
    """`1,5-8` as numbers from 1 to `most`."""
    parts = [part.split("-") for part in text.split(",")] if text else [["1", str(most)]]
    return [n for part in parts for n in range(int(part[0]), int(part[-1]) + 1)]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", default="", help="which, like 1,5-8; all")
    parser.add_argument("--aside", action="store_true", help="the questions that were kept aside")
    parser.add_argument("--seeds", type=int, default=3, help="answers for so many seeds")
    parser.add_argument("--grid-policies", default=",".join(POLICIES), help="policies of the grid; '' for no grid")
    parser.add_argument("--out", type=Path, help="append each answer to this JSONL file, and skip those in it")
    arguments = parser.parse_args()
    questions = ASIDE if arguments.aside else QUESTIONS
    done = {json.loads(line)["question"]: json.loads(line) for line in arguments.out.read_text().splitlines()} if (
        arguments.out and arguments.out.exists()
    ) else {}  # fmt: skip
    rows = []
    for number in numbers(arguments.questions, len(questions)):
        question = questions[number - 1]
        row = done.get(f"{question.model} {question.cluster} {question.workload} {vars(question.bounds)}")
        if row is None:
            row = answer(question, arguments.seeds, [p for p in arguments.grid_policies.split(",") if p])
            if arguments.out:
                with arguments.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
        rows.append(row)
        print(number, json.dumps(row), flush=True)
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    spreads = [row["spread"] for row in rows if row["spread"] is not None]
    print(f"{len(rows)} questions: least ratio {min(ratios, default=float('nan')):.4f}, "
          f"largest spread {max(spreads, default=float('nan')):.4f}, "
          f"{sum(r['broken'] for r in rows)} of {sum(r['checks'] for r in rows)} fresh checks broken, "
          f"median answer {np.median([s for r in rows for s in r['seconds']]):.1f} s "
          f"({np.median([s for r in rows for s in r['cpu_seconds']]):.1f} s of CPU)")  # fmt: skip


if __name__ == "__main__":
    main()
