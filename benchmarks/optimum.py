"""What `tune` finds without a rate beside a scan of every schedule, policy by policy, and the CPU time of the search.

Four known questions and some drawn with a seed: models of 8B to 70B on 1 to 8 devices, with and without bounds on
latency, TTFT and TPOT. The scan shares the estimate of a point with the search, but neither its grids nor its pruning:
it looks at every replica size, layout and split of the devices, at every batch (beside token budgets and N_D every one
up to 64, then steps of 1 %), token budgets in steps of 2 %, N_D (every one up to 64, then steps of 2 %), 1 to 128
prefills per step (every one up to 16, then steps of 10 %), and all numbers of micro-batches. It first evaluates a grid
in steps of 15 %. Only those cells between the grid's points are left out for whose omission nothing must be monotone:
where all corners are 15 % worse than the best, all break the same bound by 30 %, or none fits into memory.

With `--before DIR`, a checkout of an earlier version with its extensions built, the CPU time that its search takes for
the same questions is measured beside; `--policy` without names leaves the scan out.

    python -m benchmarks.optimum
    python -m benchmarks.optimum --quick
    python -m benchmarks.optimum --known 0 --drawn 40 --seed 1 --before ../earlier
"""

import argparse
import functools
import itertools
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from xscheduler.setting_search import search_schedule
from xscheduler.settings import Setting, find_setting

if TYPE_CHECKING:
    from xcore.specs.schedule import Stage
    from xscheduler.allocation import Layout
    from xscheduler.candidates import Candidates
    from xscheduler.search_problem import SearchProblem
    from xscheduler.tuned import Tuned
    from xsimulator.steady.scenario import Scenario

POLICY_LIMIT, ANSWER_LIMIT = 0.005, 0.01
"""Shares by which the scan may be better: in a policy, and over all policies."""
TIME_LIMIT = 1.5
"""CPU time of the search over that of the earlier version."""
COARSE, WORSE, BEYOND = 1.15, 1.15, 1.3
"""Ratio of the coarse grid's neighbours; by what ratios cells are worse than the best, or beyond a bound, that are left
out.
"""
EVERY, BATCH_STEP, STEP = 64, 1.01, 1.02
"""Values up to which every one is scanned; ratios from there on: of batches, and of other variables."""
MOST_BATCH, BUDGETS, ENCODE_MICRO_BATCHES = 4096, (32, 2**18), (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True)
class Asked:
    """A question; times in seconds."""

    model: str
    cluster: str
    workload: str
    dtype: str | None = None
    latency_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def setting(self) -> Setting:
        """A question for the search."""
        return find_setting(self.model, self.cluster, self.workload, "roofline", dtype=self.dtype)

    def search(self, policies: Sequence[str], fixed: dict[str, int] | None = None) -> "Tuned":
        """The answer of `tune`."""
        return search_schedule(
            self.setting,
            self.latency_s,
            ttft_s=self.ttft_s,
            tpot_s=self.tpot_s,
            policies=tuple(policies),
            fixed=fixed,
        )

    def __str__(self) -> str:
        """Return the question in one line."""
        bounds = (("latency", self.latency_s), ("TTFT", self.ttft_s), ("TPOT", self.tpot_s))
        limits = ", ".join(f"{name} {limit:.3g} s" for name, limit in bounds if limit) or "no bound"
        return f"{self.model} {self.dtype or ''} {self.cluster} {self.workload}, {limits}".replace("  ", " ")


KNOWN = (
    Asked("llama-3.1-70b", "8xH100-SXM", "2048/256", "fp8", ttft_s=1.0, tpot_s=0.04),
    Asked("llama-3.1-70b", "4xH100-SXM", "2048/512", ttft_s=0.5, tpot_s=0.03),
    Asked("deepseek-r1-distill-llama-70b", "4xH100-SXM", "1024/512", latency_s=20.0),
    Asked("llama-3.1-8b", "1xH100-SXM", "2048/256", latency_s=5.0),
)
MODELS = (("llama-3.1-8b", None), ("qwen3-14b", None), ("qwen3-32b", None), ("llama-3.1-70b", "fp8"))
KINDS = ("H100-SXM", "H200-SXM", "A100-80GB", "L40S", "B200")
WORKLOADS = ("2048/256", "1024/512", "512/512", "4096/64", "500/1500", "S", "T", "C1")
BOUNDED = ((), ("latency_s",), ("ttft_s", "tpot_s"), ("tpot_s",), ("latency_s", "ttft_s", "tpot_s"))


def drawn(count: int, seed: int) -> list[Asked]:
    """Questions whose bounds are 1.2 to 6 times what one sequence takes at a time."""
    rng, questions = random.Random(seed), list[Asked]()
    while len(questions) < count:
        model, dtype = rng.choice(MODELS)
        kind = rng.choice([kind for kind in KINDS if dtype != "fp8" or not kind.startswith("A100")])
        asked = Asked(model, f"{rng.randint(1, 8)}x{kind}", rng.choice(WORKLOADS), dtype)
        looser = {name: rng.uniform(1.2, 6.0) for name in BOUNDED[len(questions) % len(BOUNDED)]}
        alone = asked.search(("chunked",), fixed={"max_num_seqs": 1}).estimate
        if alone is None:
            continue  # the model doesn't fit
        least = {"latency_s": alone.latency_s, "ttft_s": alone.ttft_bounded_s, "tpot_s": alone.tpot_bounded_s}
        bounds = {name: ratio * (least[name] or 0.0) for name, ratio in looser.items()}
        latency_s, ttft_s, tpot_s = (bounds.get(name) for name in least)
        questions.append(replace(asked, latency_s=latency_s, ttft_s=ttft_s, tpot_s=tpot_s))
    return questions


# ---- the scan


def rising(low: int, high: int, ratio: float, every: int) -> list[int]:
    """Every value from `low` up to `every`, then steps of at most this ratio, and `high`."""
    values = list(range(low, min(high, every) + 1))
    value = float(max(low, every + 1))
    while round(value) <= high:
        if not values or round(value) > values[-1]:
            values.append(round(value))
        value = max(value * ratio, value + 1.0)
    return values if values[-1] == high else [*values, high]


@dataclass
class Scan:
    """The best of one policy; grids of two steps: `coarse` for all spaces, then `fine` for the best cells of them."""

    problem: "SearchProblem"
    policy: str
    throughput: float = 0.0
    best: dict[str, object] = field(default_factory=dict)
    evaluations: int = 0
    cells: list[tuple[float, "Candidates", tuple[range, ...]]] = field(default_factory=list)

    def run(self) -> "Scan":
        """Look at all spaces."""
        for space in spaces(self.policy, self.problem):
            self._coarse(space)
        for reach, space, box in sorted(self.cells, key=lambda cell: -cell[0]):
            if reach * WORSE > self.throughput:
                for point in itertools.product(*box):
                    self._evaluate(space, point)
        return self

    def _evaluate(self, space: "Candidates", point: tuple[int, ...]) -> tuple[float, tuple[float, ...]]:
        """Throughput and figures over their limits; takes a feasible point that is better."""
        values = space.values(point)
        result = space.simulate(values)
        self.evaluations += 1
        ratios = tuple(f / c.limit for f, c in zip(result.figures, space.constraints, strict=True))
        if result.throughput > self.throughput and max(ratios) <= 1.0:
            self.throughput = result.throughput
            self.best = space.controls(values) | _allocation(space.where.replicas, space.where.replica.stages)
        return result.throughput, ratios

    def _coarse(self, space: "Candidates") -> None:
        """Evaluate the coarse grid, and keep the cells of which something may be better."""
        edges = [coarse(variable.values) for variable in space.variables]
        seen: dict[tuple[int, ...], tuple[float, tuple[float, ...]]] = {}
        for rest in itertools.product(*edges[1:]):
            for first in edges[0]:  # batches: memory only rises along them
                point = (first, *rest)
                seen[point] = self._evaluate(space, point)
                if seen[point][1][0] > 1.0:
                    break
        sides = [list(itertools.pairwise(edge)) or [(edge[0], edge[0])] for edge in edges]
        for cell in itertools.product(*sides):
            corners = [seen[point] for point in itertools.product(*cell) if point in seen]
            if not corners or min(ratios[0] for _, ratios in corners) > 1.0:
                continue
            least = [min(column) for column in zip(*(ratios for _, ratios in corners), strict=True)]
            reach = max(throughput for throughput, _ in corners)
            if max(least) <= BEYOND and reach * WORSE > self.throughput:
                self.cells.append((reach, space, tuple(range(low, high + 1) for low, high in cell)))


def coarse(values: Sequence[int]) -> list[int]:
    """Places of values in steps of `COARSE`, every one of the first eight."""
    places = [0]
    for place in range(1, len(values)):
        if place < 8 or values[place] >= COARSE * values[places[-1]] or place == len(values) - 1:
            places.append(place)
    return places


def spaces(policy: str, problem: "SearchProblem") -> Iterator["Candidates"]:
    """Every space of a policy."""
    from xscheduler.candidates import candidates
    from xscheduler.ceilings import SpaceLimits
    from xscheduler.space import Variable

    def space(where: "Callable[[], Scenario]", *variables: Variable, **constants: int) -> "Candidates":
        anything = SpaceLimits(math.inf, 0.0)
        return candidates(policy, problem, where, variables, anything, 0.0, **constants)

    if policy.startswith("waa"):
        batches = Variable("encode_batch", range(1, MOST_BATCH + 1))
        for encode, decode in pairs(problem):
            for count in range(1, len(decode.degrees) + 1):
                yield space(functools.partial(problem.split, encode, decode), batches, micro_batches=count)
        return
    for layout in layouts(problem, uniform=policy != "rra"):
        where, stages = functools.partial(problem.both, layout), len(layout.degrees)
        counts = [stages * times for times in ENCODE_MICRO_BATCHES] if stages > 1 else [1]
        name = "max_num_seqs" if policy in ("orca", "chunked") else "encode_batch"
        batches = Variable(name, range(1, MOST_BATCH + 1))
        fewer = Variable(name, rising(1, MOST_BATCH, BATCH_STEP, EVERY))
        if policy == "static":
            yield space(where, batches)
        elif policy == "hybrid":
            for encode_count, parts in itertools.product(counts, range(1, stages + 1)):
                yield space(where, batches, encode_micro_batches=encode_count, micro_batches=parts)
        elif policy == "orca":
            for prefills in rising(1, 128, 1.1, 16):
                yield space(where, batches, prefills_per_step=prefills, grows=False)
        elif policy == "chunked":
            budgets = Variable("max_num_batched_tokens", rising(*BUDGETS, STEP, BUDGETS[0]))
            yield space(where, fewer, budgets, grows=False)
        else:
            output = problem.load.workload.output.max
            iterations = Variable("decode_iterations", rising(1, output, STEP, EVERY))
            for encode_count in counts:
                yield space(where, fewer, iterations, encode_micro_batches=encode_count)


def layouts(problem: "SearchProblem", uniform: bool) -> Iterator["Layout"]:
    """Yield all layouts of all numbers of devices on which the weights fit."""
    for devices in range(1, problem.cost_model.cluster.devices + 1):
        for layout in problem.layouts(devices, uniform):
            if problem.both(layout).replica.room((1.0, 1.0)) > 0:
                yield layout


def pairs(problem: "SearchProblem") -> Iterator[tuple["Layout", "Layout"]]:
    """Yield all pairs of layouts of WAA's sides on which the weights fit."""
    devices = problem.cost_model.cluster.devices
    for encoding in range(1, devices):
        for decoding in range(1, devices - encoding + 1):
            sides = problem.layouts(encoding, False, "encode"), problem.layouts(decoding, False)
            for encode, decode in itertools.product(*sides):
                replica = problem.split(encode, decode).replica
                if min(replica.room((1.0, 1.0), side) for side in ("encode", "decode")) > 0:
                    yield encode, decode


def problem_of(asked: Asked, policy: str) -> "SearchProblem":
    """The question of a policy, on the engine that runs it."""
    from xscheduler.search_problem import Limits, SearchProblem
    from xsimulator.cost.cost_model import CostModel
    from xsimulator.steady.load import Load

    setting = asked.setting.on(policy)
    cost_model = CostModel(setting.model, setting.cluster, setting.profile, setting.kv_dtype, watched=False)
    load = Load(setting.workload, setting.model.encoder_layers > 0)
    return SearchProblem(cost_model, load, Limits(asked.latency_s, asked.ttft_s, asked.tpot_s), {})


# ---- beside the search


@dataclass(frozen=True)
class Row:
    """The search and the scan of a policy; output tokens per second."""

    policy: str
    search: float
    scan: float
    searched: str
    scanned: str

    @property
    def gap(self) -> float:
        """Return the share by which the scan is better."""
        return self.scan / self.search - 1.0 if self.search else (math.inf if self.scan else 0.0)


def rows_of(asked: Asked, policies: Sequence[str], tuned: "Tuned") -> Iterator[Row]:
    """Run each policy's search and its scan."""
    for alternative in tuned.alternatives:
        if alternative.policy in policies:
            scan = Scan(problem_of(asked, alternative.policy), alternative.policy).run()
            made, estimate = alternative.schedule, alternative.estimate
            best: dict[str, object] = {**made.control.decisions, "admission": made.admission} if made else {}
            best |= _allocation(made.replicas, made.stages) if made else {}
            throughput = estimate.throughput_tok_s if estimate else 0.0
            yield Row(alternative.policy, throughput, scan.throughput, f"{best}", f"{scan.best}")


def _allocation(replicas: int, stages: Iterable["Stage"]) -> dict[str, object]:
    """Return an allocation's printed form."""
    return {"replicas": replicas, "stages": " ".join(f"{stage.phase} {stage.tp}" for stage in stages)}


def search_seconds(questions: Iterable[Asked]) -> list[float]:
    """CPU seconds of each question's search over all policies: the quicker of two."""
    from xscheduler.spaces import POLICIES

    def once(asked: Asked) -> float:
        began = time.process_time()
        asked.search(POLICIES)
        return time.process_time() - began

    return [min(once(asked), once(asked)) for asked in questions]


def seconds_in(checkout: Path, questions: Sequence[Asked]) -> list[float]:
    """The same of the checkout's search, in a process of its own."""
    text = json.dumps([asdict(asked) for asked in questions])
    command = [sys.executable, str(Path(__file__).resolve()), "--time-stdin"]
    environment = os.environ | {"PYTHONPATH": str(checkout.resolve())}
    output = subprocess.run(command, input=text, capture_output=True, text=True, check=True, env=environment)
    seconds: list[float] = json.loads(output.stdout.splitlines()[-1])
    return seconds


def main() -> None:
    """Print each question, and exit with 1 beyond a limit."""
    from xscheduler.spaces import POLICIES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--known", type=int, default=len(KNOWN), help="How many of the known questions.")
    parser.add_argument("--drawn", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="*", help="The numbers of the questions to ask, from 1 on.")
    parser.add_argument("--policy", nargs="*", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--quick", action="store_true", help="The last known question and the first drawn one.")
    parser.add_argument("--before", type=Path, help="A checkout of an earlier version, whose search is timed too.")
    parser.add_argument("--time-stdin", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.time_stdin:
        print(json.dumps(search_seconds(Asked(**asked) for asked in json.load(sys.stdin))))
        return
    questions = [*KNOWN[: arguments.known], *drawn(arguments.drawn, arguments.seed)]
    if arguments.quick:
        questions = [KNOWN[-1], *drawn(1, arguments.seed)]
    if arguments.only:
        questions = [questions[number - 1] for number in arguments.only]
    seconds = search_seconds(questions)
    before = seconds_in(arguments.before, questions) if arguments.before else []
    gaps, answer_gaps = [], []
    for number, asked in enumerate(questions):
        times = f"search {seconds[number]:.2f} s of CPU time"
        times += f", before {before[number]:.2f} s" if before else ""
        print(f"{number + 1}. {asked}: {times}", flush=True)
        if not arguments.policy:
            continue
        began, best = time.process_time(), 0.0
        tuned = asked.search(POLICIES)
        for row in rows_of(asked, arguments.policy, tuned):
            gaps.append(row.gap)
            best = max(best, row.scan)
            late = "" if row.gap <= POLICY_LIMIT else f"\n     search {row.searched}\n     scan   {row.scanned}"
            print(f"   {row.policy:8} {row.search:10,.1f} {row.scan:10,.1f} tokens/s {row.gap:+.2%}{late}", flush=True)
        answer = tuned.estimate.throughput_tok_s if tuned.estimate else 0.0
        answer_gaps.append(best / answer - 1.0 if answer else float(best > 0))
        print(f"   answer   {answer:10,.1f} {best:10,.1f} tokens/s {answer_gaps[-1]:+.2%}", end="")
        print(f"; the scan took {time.process_time() - began:.0f} s", flush=True)
    over = sum(gap > POLICY_LIMIT for gap in gaps)
    worst = max(gaps, default=0.0)
    print(f"{len(gaps)} searches: the scan is better by over {POLICY_LIMIT:.1%} in {over}, at worst {worst:.2%}")
    print(f"{len(answer_gaps)} answers: at worst {max(answer_gaps, default=0.0):.2%} (limit {ANSWER_LIMIT:.0%})")
    slow = False
    if before:
        ratio = sum(seconds) / sum(before)
        slowest = max(now / then for now, then in zip(seconds, before, strict=True))
        slow = ratio > TIME_LIMIT
        print(f"CPU time of all searches: {sum(seconds):.2f} s, before {sum(before):.2f} s: {ratio:.2f} times", end="")
        print(f" (limit {TIME_LIMIT}), of one question {slowest:.2f} times at most")
    sys.exit(bool(over or max(answer_gaps, default=0.0) > ANSWER_LIMIT or slow))


if __name__ == "__main__":
    main()
