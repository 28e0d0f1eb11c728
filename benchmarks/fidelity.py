"""Prediction beside measurement: does a schedule do what the simulator predicted, and does it hold its bound?

For several (workload, bound) pairs, the best schedule is tuned from a measured profile, or every policy's best one, and
run on the very requests that the replay predicts, several times over. Run it when the machine is quiet.

    python -m benchmarks.fidelity --runs 3
    python -m benchmarks.fidelity --policy all  # every policy's best schedule, not the best of all alone
    python -m benchmarks.fidelity --policy all --disturb   # a busy process on one core during the runs
    python -m benchmarks.fidelity --model DIR   # another model's directory, which `exegpt model create` may have made
    python -m benchmarks.fidelity --model DIR --device cuda --dtype bf16   # on a GPU
    python -m benchmarks.fidelity --ranks 2     # under mpirun: two stages, and encoding and decoding disaggregated
"""

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.job import measure_ranks, mpirun
from exegpt.api.compare import execute
from exegpt.api.demo import create_demo_model
from xcore.console.comparison import Comparison, relative
from xcore.requests.requests import random_requests
from xcore.specs.workload import Workload
from xprofiler import store
from xprofiler.measure import measure_profile
from xrunner.models import load_model
from xscheduler.setting_search import search_schedule
from xscheduler.settings import Setting, find_setting

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from xscheduler.setting_search import SearchKeywords


DATA = Path(os.environ.get("EXEGPT_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
CASES = (  # workload, columns, the bound as a place between the lowest latency (0) and the unbounded optimum's (1)
    ("T", None, 0.5),
    ("S", None, 0.3),
    ("S", None, 0.7),
    ("G", None, 0.5),
    ("C1", None, 0.3),
    ("C2", None, 0.5),
    ("lengths/multi30k_en_de.csv", "input=en_tokens,output=de_tokens", 0.5),
    ("azure/AzureLLMInferenceTrace_conv.csv", None, 0.5),
    ("azure/AzureLLMInferenceTrace_code.csv", None, 0.5),
    ("lengths/sharegpt_8k.csv", None, 0.5),
    ("lengths/arxiv_summarization.csv", None, 0.5),
)


@dataclass(frozen=True)
class Row:
    """One case: the schedule and, over all runs, the errors' median and worst."""

    workload: str
    schedule: str
    bound_s: float
    requests: int
    measured_tok_s: float
    predicted_tok_s: float
    throughput_errors: tuple[float, ...]
    """(measured - predicted) / measured, one per run, for the replay of these very requests."""
    steady_errors: tuple[float, ...]
    """The same for the steady-state estimate, over the window between ramp-up and drain."""
    latency_s: float
    """Median over the runs of the bound's latency."""
    worst_latency_s: float
    predicted_latency_s: float
    slowdowns: tuple[tuple[float, ...], ...]
    """How many times as long as in the profile computing, reading weights, the head and attention took around a run."""

    @property
    def holds(self) -> bool:
        """Whether the median run's bound latency meets the bound."""
        return self.latency_s <= self.bound_s


def bound_between(setting: Setting, place: float, **options: "Unpack[SearchKeywords]") -> float:
    """A bound in seconds, to two digits, geometrically between the lowest latency and the unbounded optimum's."""
    options["lowest_latency"] = True
    free = search_schedule(setting, None, **options)
    if free.estimate is None or free.estimate.latency_s is None or free.lowest_latency_s is None:
        raise SystemExit(f"nothing is feasible for workload {setting.workload.name}")
    bound = free.lowest_latency_s ** (1 - place) * free.estimate.latency_s**place
    return float(f"{bound:.2g}")


def evenly(setting: Setting, number: int) -> Setting:
    """The setting with `number` rows of a trace, taken evenly: its beginning may not be like the rest."""
    rows = setting.workload.requests
    if not rows or len(rows) <= number:
        return setting
    every = [rows[i * len(rows) // number] for i in range(number)]
    return replace(setting, workload=replace(setting.workload, requests=tuple(every)))


def run_case(
    model: Any,
    setting: Setting,
    place: float,
    policies: tuple[str, ...],
    every: bool,
    number: int,
    runs: int,
    seed: int,
) -> list[Row]:
    """Tune one case and run its best schedule, or with `every` each policy's, `runs` times in turns."""
    bound = bound_between(setting, place, policies=policies)
    answer = search_schedule(setting, bound, policies=policies)
    if answer.schedule is None:
        raise SystemExit(f"nothing meets {bound} s for workload {setting.workload.name}")
    schedules = [a.schedule for a in answer.alternatives if a.schedule] if every else [answer.schedule]
    lengths = [replace(r, arrival_s=0.0) for r in setting.workload.draw(number, seed, setting.model.longest_request)]
    requests = random_requests(lengths, setting.model.vocab, seed)
    done: list[list[Comparison]] = [[] for _ in schedules]
    for _ in range(runs):
        for comparisons, schedule in zip(done, schedules, strict=True):
            comparisons.append(execute(model, schedule, setting.profile, requests))
    return [row(setting, bound, number, comparisons) for comparisons in done]


def row(setting: Setting, bound: float, number: int, done: list[Comparison]) -> Row:
    """What came of one schedule's runs."""
    from xcore.console.schedule_text import schedule_text

    steady = [relative(c.steady_measured_tok_s, c.steady.throughput_tok_s) for c in done if c.steady]
    latencies = [c.measured.latency_s or math.nan for c in done]
    return Row(
        workload=Path(setting.workload.name).name,
        schedule=schedule_text(done[0].schedule),
        bound_s=bound,
        requests=number,
        measured_tok_s=statistics.median(c.measured.throughput_tok_s for c in done),
        predicted_tok_s=statistics.median(c.predicted.throughput_tok_s for c in done),
        throughput_errors=tuple(c.error()["throughput_tok_s"] or 0.0 for c in done),
        steady_errors=tuple(e for e in steady if e is not None),
        latency_s=statistics.median(latencies),
        worst_latency_s=max(latencies),
        predicted_latency_s=statistics.median(c.predicted.latency_s or math.nan for c in done),
        slowdowns=tuple(c.slowdown.factors for c in done),
    )


@contextmanager
def disturbed(active: bool) -> Iterator[None]:
    """Another process computes on one of the cores meanwhile, where asked for."""
    if not active:
        yield
        return
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    os.sched_setaffinity(busy.pid, {min(os.sched_getaffinity(0))})
    try:
        yield
    finally:
        busy.kill()
        busy.wait()


@dataclass(frozen=True)
class RanksRow:
    """One schedule on the ranks of a job: `run --json`'s figures, of the median run."""

    workload: str
    schedule: str
    requests: int
    seconds: tuple[float, ...]
    """Of each run."""
    figures: dict[str, tuple[float | None, float | None, float | None]]
    """Figure → predicted, measured, (measured - predicted) / measured."""


MEMORY_FRACTION = 0.05
"""Of the memory: room for so few residents that a run of seconds fills it, and comes to a steady state."""
FIGURES = ("throughput_tok_s", "latency_s", "latency_p50_s", "ttft_s", "tpot_s")


def run_ranks(ranks: int, directory: Path, seconds: float, runs: int, seed: int, only: str | None) -> list[RanksRow]:
    """RRA on a pipeline of all ranks under a middling bound, and WAA with the ranks dealt to its sides, tasks T and S:
    a profile that these ranks measured, and about `seconds` of requests.
    """
    from xcore import document
    from xcore.console.schedule_text import schedule_text

    cluster, profile = measure_ranks(directory, ranks)
    folder, rows = profile.parent, []
    for workload, policy in itertools.product(("T", "S"), ("rra", "waa-c,waa-m")):
        if only and only != workload:
            continue
        setting = find_setting(str(directory), str(cluster), workload, str(profile), memory_fraction=MEMORY_FRACTION)
        options: SearchKeywords = {"policies": tuple(policy.split(",")), "fixed": {"replicas": 1, "tp_degree": 1}}
        # where WAA's memory is full, as with T on two devices, memory alone limits how many are resident
        bound_s = bound_between(setting, 0.5, **options) if policy == "rra" else None
        answer = search_schedule(setting, bound_s, **options)
        if answer.schedule is None or answer.estimate is None:
            raise SystemExit(f"no schedule of policy {policy} for workload {workload}")
        number = max(32, round(seconds * answer.estimate.throughput_seq_s))
        drawn = setting.workload.draw(number, seed, setting.model.longest_request)
        lengths = [replace(r, arrival_s=0.0) for r in drawn]
        document.write(folder / "schedule.json", answer.schedule)
        text = "input,output\n" + "".join(f"{r.input},{r.output}\n" for r in lengths)
        (folder / "requests.csv").write_text(text, encoding="utf-8")
        run = ["-m", "exegpt", "run", "--model", directory, "--json"]
        files = ["--schedule", folder / "schedule.json", "--requests", folder / "requests.csv", "--profile", profile]
        done = [json.loads(mpirun(ranks, *run, *files)) for _ in range(runs)]
        middle = sorted(done, key=lambda measured: measured["seconds"])[(runs - 1) // 2]
        figures = {key: (middle["predicted"][key], middle[key], middle["error"][key]) for key in FIGURES}
        times = tuple(measured["seconds"] for measured in done)
        rows.append(RanksRow(workload, schedule_text(answer.schedule), number, times, figures))
        print(f"{workload} {policy}: {figures}", file=sys.stderr)
    return rows


def show_ranks(rows: list[RanksRow], ranks: int) -> None:
    """Print the table."""
    from xcore.console import output

    lines = []
    for row in rows:
        for key, (predicted, measured, error) in row.figures.items():
            text = output.number if key == "throughput_tok_s" else output.seconds
            lines.append([row.workload, row.schedule, key, text(predicted), text(measured), output.share(error)])
        lines.append(["", f"{row.requests} requests", "seconds", "", " ".join(f"{t:.1f}" for t in row.seconds), ""])
    columns = ("task", "schedule", "figure", "predicted", "measured", "deviation")
    output.table(columns, lines, f"Predicted and measured on {ranks} ranks, the median run")


def document(rows: list[Row]) -> dict[str, Any]:
    """The rows as JSON."""
    return {"rows": [{**row.__dict__, "holds": row.holds} for row in rows]}


def show(rows: list[Row]) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Predicted and measured, median (worst) over the runs")
    for name in (
        "workload",
        "schedule",
        "n",
        "tok/s",
        "error",
        "speed",
        "steady error",
        "bound",
        "latency",
        "predicted",
        "holds",
    ):
        table.add_column(name, justify="left" if name in ("workload", "schedule") else "right", overflow="fold")
    for row in rows:
        table.add_row(
            row.workload,
            row.schedule,
            str(row.requests),
            f"{row.measured_tok_s:.0f}",
            _errors(row.throughput_errors),
            _speeds(row.slowdowns),
            _errors(row.steady_errors),
            f"{row.bound_s:g} s",
            f"{row.latency_s:.2f} ({row.worst_latency_s:.2f})",
            f"{row.predicted_latency_s:.2f}",
            "yes" if row.holds else "NO",
        )
    Console(width=170).print(table)
    each = [abs(error) for row in rows for error in row.throughput_errors]
    held = sum(row.holds for row in rows)
    print(
        f"throughput of {len(each)} runs: median absolute error {statistics.median(each):.1%}, worst single run "
        f"{max(each):.1%}; bounds held: {held}/{len(rows)}"
    )


def _errors(errors: tuple[float, ...]) -> str:
    return f"{statistics.median(errors):+.1%} ({max(errors, key=abs):+.1%})" if errors else "–"


def _speeds(slowdowns: tuple[tuple[float, ...], ...]) -> str:
    """Return the speeds of computing, reading weights, the head and attention in each run, over the profile's."""
    return " ".join("/".join(f"{1 / factor:.2f}" for factor in factors) for factors in slowdowns)


def main() -> None:
    """Run all cases and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, help="instead, schedules of so many devices, under mpirun")
    parser.add_argument("--seconds", type=float, default=20.0, help="of requests in a run on several ranks")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--policy", default="static,orca,chunked,rra", help="policies to choose from; all: run each")
    parser.add_argument("--disturb", action="store_true", help="another process computes on one core during the runs")
    parser.add_argument("--only", help="a workload: run its cases alone")
    parser.add_argument("--model", type=Path, help="a model's directory, instead of the demo's")
    parser.add_argument("--dir", type=Path, default=Path("exegpt-demo"), help="where the demo's model is")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", default="fp32", help="of weights, keys and values")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    import torch

    if args.threads:
        torch.set_num_threads(args.threads)
    directory = args.model or create_demo_model(args.dir, 0)
    if args.ranks:
        rank_rows = run_ranks(args.ranks, directory, args.seconds, args.runs, args.seed, args.only)
        if args.json:
            print(json.dumps({"rows": [row.__dict__ for row in rank_rows]}, indent=2))
        else:
            show_ranks(rank_rows, args.ranks)
        return
    device = torch.device(args.device)
    model = load_model(directory, args.dtype, device=device)
    if store.find(model.spec, args.dtype, store.facts(device)) is None:
        print("measuring the model's layers", file=sys.stderr)
        measure_profile(directory, args.dtype, device=device)
    rows = []
    for workload, columns, place in CASES:
        if args.only and args.only not in workload:
            continue
        if "/" in workload and not (DATA / workload).is_file():
            print(f"skipped: there is no trace {workload} under {DATA} (EXEGPT_DATA)", file=sys.stderr)
            continue
        source: str | Workload = str(DATA / workload) if "/" in workload else workload
        full = find_setting(
            str(directory),
            "local",
            source,
            columns=columns,
            dtype=args.dtype,
            scale_to_context=True,
            device=args.device,
        )
        setting = evenly(full, args.requests)
        every = args.policy == "all"
        names = ("static", "hybrid", "orca", "chunked", "rra") if every else tuple(args.policy.split(","))
        with disturbed(args.disturb):
            case_rows = run_case(model, setting, place, names, every, args.requests, args.runs, args.seed)
        rows += case_rows
        for case_row in case_rows:
            errors, speeds = _errors(case_row.throughput_errors), _speeds(case_row.slowdowns)
            print(f"{case_row.workload}: {case_row.schedule}: {errors}, speed {speeds}", file=sys.stderr)
    if args.json:
        print(json.dumps(document(rows), indent=2))
    else:
        show(rows)


if __name__ == "__main__":
    main()
