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

import numpy as np

from xcore import document
from xcore.spec import Spec
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import ClusterSpec, parse_cluster
from xcore.specs.model import ModelSpec
from xcore.specs.profile import Profile
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

    def __str__(self) -> str:
        return f"{self.model} {self.cluster} {self.workload} {vars(self.bounds)}"


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


@dataclass(frozen=True)
class Setup:
    """The input of the search and of the grid for one question."""

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    profile: Profile
    arrivals: Arrivals
    bounds: RateBounds

    @property
    def meter(self) -> Meter:
        """A new meter of goodput."""
        return Meter(self.profile, self.arrivals, self.bounds)

    def tune(self) -> Rated:
        """Search all policies. The rate of the estimates is so low that every schedule sustains it."""
        return tune_at(self.model, self.cluster, self.workload, self.profile, self.arrivals, self.bounds, 1e-3)


def setup_of(question: Asked, seed: int) -> Setup:
    """The specs of a question, and arrivals by a seed."""
    model, cluster = builtin_model(question.model), parse_cluster(question.cluster)
    lengths = question.workload.split("/")
    workload = Workload.fixed(int(lengths[0]), int(lengths[1])) if len(lengths) == 2 else task(question.workload)
    arrivals = Arrivals.poisson(workload, model.longest_request, seed, cluster.devices)
    return Setup(model, cluster, workload, roofline_profile(model, cluster), arrivals, question.bounds)


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

    def __init__(self, setup: Setup, policies: Sequence[str]):
        self.meter = setup.meter
        profile = setup.profile
        cost_model = CostModel(setup.model, setup.cluster, profile, profile.dtype, watched=False)
        load = Load(setup.workload, setup.model.encoder_layers > 0)
        self.problem = SearchProblem(cost_model, load, Limits(setup.bounds.latency_s), {}, open_system=True)
        self.policies = policies
        self.points, self.best = 0, 0.0
        self.schedule: Schedule | None = None

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


@dataclass(frozen=True)
class GridAnswer:
    """The best schedule of a dense grid; None where no schedule of the grid is above 98 % of the search's."""

    goodput: float | None
    policy: str | None
    chosen: dict[str, int]
    ratio: float
    """The search's goodput over the grid's."""
    points: int
    replays: int
    cpu_seconds: float


@dataclass(frozen=True)
class Answer(Spec):
    """A question's answer, as a line of the output file."""

    question: str
    goodput: tuple[float, ...]
    """Requests/s, by seed."""
    spread: float | None
    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]
    replays: int
    policy: str | None
    chosen: dict[str, int]
    checks: int
    """Schedules at 98 % of their goodput on fresh seeds."""
    broken: int
    """Checks in which a bound breaks."""
    grid: GridAnswer | None


def fresh(rated: Rated, question: Asked) -> list[bool]:
    """Whether each policy's schedule breaks a bound at 98 % of its goodput, on seeds that the search didn't use."""
    broken = []
    for seed in FRESH:
        meter = setup_of(question, seed).meter
        for sustained in rated.sustained.values():
            if sustained.goodput_seq_s:
                served = meter.served_at(sustained.schedule, SHARE * sustained.goodput_seq_s)
                broken.append(meter.bounds.broken(served) != "")
    return broken


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


def answer(question: Asked, seeds: int, grid_policies: Sequence[str]) -> Answer:
    """Everything about one question."""
    rated, seconds, cpu_seconds = list[Rated](), [], []
    for seed in range(seeds):
        setup = setup_of(question, seed)
        began, cpu = time.perf_counter(), time.process_time()
        rated.append(setup.tune())
        seconds.append(round(time.perf_counter() - began, 2))
        cpu_seconds.append(round(time.process_time() - cpu, 2))
    first, reached = rated[0], tuple(tuned.highest_rate_seq_s for tuned in rated)
    best = max(first.sustained.values(), key=lambda sustained: sustained.goodput_seq_s, default=None)
    broken = fresh(first, question)
    return Answer(
        question=str(question),
        goodput=reached,
        spread=max(reached) / min(reached) - 1 if min(reached) else None,
        seconds=tuple(seconds),
        cpu_seconds=tuple(cpu_seconds),
        replays=first.tuned.search.replays,
        policy=best.schedule.policy if best else None,
        chosen=variables(best.schedule if best else None),
        checks=len(broken),
        broken=sum(broken),
        grid=grid_answer(question, reached[0], grid_policies) if grid_policies else None,
    )


def grid_answer(question: Asked, reached: float, policies: Sequence[str]) -> GridAnswer:
    """The best schedule of the grid."""
    began, grid = time.process_time(), Grid(setup_of(question, 0), policies)
    grid.run(reached)
    return GridAnswer(
        goodput=grid.best if grid.schedule else None,
        policy=grid.schedule.policy if grid.schedule else None,
        chosen=variables(grid.schedule),
        ratio=reached / grid.best if grid.schedule else 1.0,
        points=grid.points,
        replays=grid.meter.replays,
        cpu_seconds=round(time.process_time() - began, 1),
    )


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
    known = arguments.out and arguments.out.exists()
    lines = arguments.out.read_text().splitlines() if known else []
    done = {row.question: row for row in (document.from_dict(Answer, json.loads(line), "an answer") for line in lines)}
    rows = []
    for number in numbers(arguments.questions, len(questions)):
        question = questions[number - 1]
        row = done.get(str(question))
        if row is None:
            row = answer(question, arguments.seeds, [p for p in arguments.grid_policies.split(",") if p])
            if arguments.out:
                with arguments.out.open("a") as file:
                    file.write(json.dumps(document.to_dict(row)) + "\n")
        rows.append(row)
        print(number, json.dumps(document.to_dict(row)), flush=True)
    ratios = [row.grid.ratio for row in rows if row.grid]
    spreads = [row.spread for row in rows if row.spread is not None]
    wall = np.median([s for row in rows for s in row.seconds])
    cpu = np.median([s for row in rows for s in row.cpu_seconds])
    print(
        f"{len(rows)} questions: least ratio {min(ratios, default=float('nan')):.4f}, largest spread "
        f"{max(spreads, default=float('nan')):.4f}, {sum(row.broken for row in rows)} of "
        f"{sum(row.checks for row in rows)} fresh checks broken, median answer {wall:.1f} s ({cpu:.1f} s of CPU)"
    )


if __name__ == "__main__":
    main()
