"""`exegpt demo`: the whole way once, on this machine, with nothing else needed."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exegpt.cli import INFEASIBLE, options

if TYPE_CHECKING:
    import torch

    from exegpt.cli.inputs import Setting
    from exegpt.report.comparison import Comparison
    from exegpt.request import Request
    from exegpt.schedule import Schedule
    from xscheduler.tuned import Tuned

BUDGET_S = 75.0
"""What all runs together may take, as predicted: the number of requests follows from it."""
LEAST, MOST = 32, 1024
"""Requests that are run at least, however slow the machine, and at most."""
PLACES = (1 / 3, 1 / 2, 2 / 3, 1 / 5, 4 / 5)
"""Where the demo looks for its bound: shares, by factors, of the way from the lowest latency to the unbounded one."""
ROOM = 0.06
"""Share of the bound that the demo's plan leaves, since a machine that others use too is not always as fast."""


def demo(
    trace: Annotated[str | None, typer.Option("--trace", help="Take the lengths from this trace.")] = None,
    workload: options.WORKLOAD = None,
    latency_bound: Annotated[
        str | None,
        typer.Option(
            "--latency-bound",
            "-l",
            help=options.LATENCY_BOUND_HELP + " Default: a place on the frontier whose best schedule serves so few"
            " requests best, too.",
        ),
    ] = None,
    num: Annotated[
        int | None, typer.Option("--num", "-n", min=1, help="Requests. Default: as a minute allows.")
    ] = None,
    directory: Annotated[Path, typer.Option("--dir", help="Where everything goes.")] = Path("exegpt-demo"),
    columns: options.COLUMNS = None,
    seed: options.SEED = 0,
    device: options.DEVICE = None,
    attention: options.ATTENTION = None,
    dtype: options.RUN_DTYPE = None,
    threads: options.THREADS = None,
    json: options.JSON = False,
) -> int:
    """Make a small model, profile it, tune under a bound, run requests, and print predicted beside measured.

    Example: exegpt demo
    """
    from exegpt import document
    from exegpt.cli import inputs, output
    from exegpt.cli.answer import answer_document, infeasible_text
    from exegpt.cli.bench import compare_policies
    from exegpt.columns import parse_columns
    from exegpt.duration import parse_duration
    from exegpt.errors import InputError
    from exegpt.model import ModelSpec
    from exegpt.models.device import find_device
    from exegpt.models.planning import choose_attention
    from exegpt.trace import parse_workload
    from xrunner.comm.ranks import Ranks

    inputs.set_threads(threads)
    there = find_device(device)
    asked_bound = parse_duration(latency_bound) if latency_bound else None
    if trace and workload:
        raise InputError(f"Lengths are those of '{trace}' or of '{workload}': leave --trace or --workload out.")
    inputs.check_columns(columns, trace, workload)
    parse_workload(trace or workload or "T", parse_columns(columns) if columns else None)  # before minutes of work
    directory.mkdir(parents=True, exist_ok=True)
    model = create_demo_model(directory, seed)
    asked = dtype or ("fp32" if there.type == "cpu" else "bf16")
    chosen, why = choose_attention(attention, ModelSpec.from_directory(model), asked, there)
    for text in why:
        output.note(f"· {text}")
    setting = _setting(model, trace or workload or "T", columns, there, asked, chosen)
    frontier = _frontier(setting)
    plan = _plan(setting, [asked_bound] if asked_bound else _places(frontier), num, seed)
    answer, bound_s = plan.answer, plan.bound_s
    if answer.schedule is None:
        if json:
            output.emit(answer_document(answer, setting))
        output.note(infeasible_text(answer, bound_s))
        return INFEASIBLE
    _print_search(setting, [*frontier, answer], bound_s)
    if (first := plan.best_steady) and first != answer.schedule:
        output.note(
            f"· {first.policy} has the best steady state, but {len(plan.requests)} requests begin all at once: their "
            f"replay is through first, within the bound, under {answer.schedule.policy}"
        )
    output.note(f"3. Running {len(plan.requests)} requests under each of {len(plan.schedules)} schedules …")
    requests, schedules = plan.requests, plan.schedules
    done = compare_policies(model, schedules, setting, requests, 1, Ranks(), there, chosen)
    document.write(directory / "schedule.json", answer.schedule)
    _leave(directory, setting, [*frontier, answer], done)
    if json:
        output.emit(
            answer_document(answer, setting)
            | {"policies": [{"policy": c.schedule.policy, **c.document()} for c in done], "directory": str(directory)}
        )
    else:
        _print_runs(done, directory)
    return 0


@dataclass(frozen=True)
class _Plan:
    """What the demo runs: the answer under a bound, and requests that keep its policies busy for about a minute."""

    bound_s: float
    answer: "Tuned"
    requests: "list[Request]"
    best_steady: "Schedule | None"
    """The schedule with the best steady state."""

    @property
    def schedules(self) -> "list[Schedule]":
        """The answer's first, then the others' by falling throughput."""
        ranked = sorted(
            (a for a in self.answer.alternatives if a.schedule and a.estimate),
            key=lambda a: (a.schedule is not self.answer.schedule, -a.estimate.throughput_tok_s),
        )
        return [a.schedule for a in ranked]


def _plan(setting: "Setting", bounds: list[float], num: int | None, seed: int) -> _Plan:
    """The first bound under which the best steady state is also the best replay of the requests and leaves room in
    both; where none is so, the first one, with the schedule that its requests' replay is best under.
    """
    from exegpt.cli.answer import search_schedule
    from exegpt.cli.shortlist import for_these
    from xsimulator.replay.event_simulator import replay

    plans: list[_Plan] = []
    for bound_s in bounds:
        best = search_schedule(setting, bound_s / (1 + ROOM))
        if best.schedule is None:
            best = search_schedule(setting, bound_s)
        if best.schedule is None:
            plans.append(_Plan(bound_s, best, [], None))
            continue
        answer = _under(best, bound_s)
        requests = _requests(setting, [a.schedule for a in answer.alternatives if a.schedule], num, seed)
        lengths = [request.lengths for request in requests]
        chosen = for_these(answer, setting.profile, lengths)
        plans.append(_Plan(bound_s, chosen, requests, answer.schedule))
        latency_s = replay(chosen.schedule, setting.profile, lengths, timeline=False).estimate.latency_s
        if chosen.schedule == answer.schedule and (latency_s or 0.0) * (1 + ROOM) <= bound_s:
            return plans[-1]
    return plans[0]


def _under(answer: "Tuned", bound_s: float) -> "Tuned":
    """The answer with its schedules under this bound, which is looser than the one that they were planned for."""

    def loosened(schedule: "Schedule | None") -> "Schedule | None":
        return schedule and replace(schedule, latency_bound_s=bound_s if math.isfinite(bound_s) else None)

    alternatives = tuple(replace(a, schedule=loosened(a.schedule)) for a in answer.alternatives)
    return replace(answer, schedule=loosened(answer.schedule), alternatives=alternatives)


def create_demo_model(directory: Path, seed: int) -> Path:
    """The demo's model, made unless an earlier demo has made it."""
    from exegpt.cli import output
    from exegpt.models.create import create_model

    path = directory / f"model-{seed}"
    if not path.is_dir():
        output.note("1. Making a model: Llama, 8 layers, 56 million random weights …")
        create_model(
            path,
            arch="llama",
            layers=8,
            hidden=512,
            heads=8,
            kv_heads=4,
            ffn=1408,
            vocab=32000,
            context=1024,
            dtype="fp32",
            seed=seed,
            shards=1,
        )
    return path


def _setting(
    model: Path, workload: str, columns: str | None, device: "torch.device", dtype: str, attention: str
) -> "Setting":
    """The model on this machine's device with a measured profile: the stored one, else a new one."""
    from exegpt.cli import inputs, output
    from exegpt.model import ModelSpec
    from xprofiler import store
    from xprofiler.measure import measure_profile

    spec = ModelSpec.from_directory(model)
    if store.find(spec, dtype, store.facts(device, attention=attention)) is None:
        output.note("2. Measuring its layers on this machine …")
        with output.progress("measuring layers") as progress:
            measure_profile(model, dtype, lambda _, done, total: progress(done, total), device, attention=attention)
    how = {"dtype": dtype, "columns": columns, "device": device.type, "attention": attention}
    setting = inputs.find_setting(str(model), "local", workload, **how)
    for text in setting.assumptions:
        output.note(f"· {text}")
    return setting


def _frontier(setting: "Setting") -> "list[Tuned]":
    from exegpt.cli.answer import frontier_bounds, search_schedule

    return [search_schedule(setting, bound_s, lowest_latency=True) for bound_s in frontier_bounds(setting)]


def _places(frontier: "list[Tuned]") -> list[float]:
    """Bounds between the lowest reachable latency and the unbounded optimum's, to two digits."""
    last = frontier[-1]
    if last.estimate is None or last.estimate.latency_s is None or last.lowest_latency_s is None:
        return [math.inf]
    low, high = last.lowest_latency_s, last.estimate.latency_s
    return [float(f"{low * max(1.0, high / low) ** place:.2g}") for place in PLACES]


def _print_search(setting: "Setting", answers: "list[Tuned]", bound_s: float) -> None:
    from exegpt.cli import output
    from exegpt.cli.answer import POLICY_COLUMNS, policy_rows, print_plot, print_search
    from exegpt.duration import format_duration

    answer = answers[-1]
    title = f"The best schedule of each policy under {format_duration(bound_s)}, workload {setting.workload.name}"
    output.table(POLICY_COLUMNS, policy_rows(answer), title)
    print_plot(answers, bound_s)
    print_search(answer)


def _requests(setting: "Setting", schedules: list[Any], num: int | None, seed: int) -> "list[Request]":
    """Requests with the workload's lengths: `num`, or as many as all schedules together serve within the budget."""
    from exegpt.cli.bench import draw
    from xrunner.core.requests import random_requests
    from xsimulator.replay.event_simulator import replay

    context = setting.model.context
    if num is None:
        sample = draw(setting.workload, 128, seed, context)
        expected = sum(replay(schedule, setting.profile, sample).seconds for schedule in schedules)
        num = min(MOST, max(LEAST, round(len(sample) * BUDGET_S / expected)))
    return random_requests(draw(setting.workload, num, seed, context), setting.model.vocab, seed)


def _leave(directory: Path, setting: "Setting", answers: "list[Tuned]", done: "list[Comparison]") -> None:
    """Write report.html and trace.json."""
    from exegpt import document
    from exegpt.cli.answer import frontier, report_facts, schedule_text
    from exegpt.report.html import Report, page
    from exegpt.timeline import chrome_trace

    best = done[0]
    facts = (*report_facts(setting), ("schedule", schedule_text(best.schedule)))
    report = Report(
        "exegpt demo: predicted beside measured",
        facts,
        setting.workload,
        frontier(answers),
        best.schedule.latency_bound_s,
        tuple(done),
    )
    document.write_text(directory / "report.html", page(report))
    timelines = [best.predicted_timeline, best.measured_timeline]
    document.write_text(directory / "trace.json", document.dumps(chrome_trace(timelines), indent=None))


def _print_runs(done: "list[Comparison]", directory: Path) -> None:
    from exegpt.cli import output
    from exegpt.cli.execute import COMPARISON_COLUMNS, bound_text, comparison_rows
    from exegpt.cli.own_profile import speed_text

    output.table(COMPARISON_COLUMNS, comparison_rows(done), "Predicted for these very requests, and measured")
    if text := bound_text(done[0], "steady state and the replay of these very requests"):
        print(text)
    if text := speed_text(done[0].slowdown):
        output.note(f"· {text}")
    print(f"Left in {directory}/: report.html (open it in a browser), schedule.json, trace.json (for ui.perfetto.dev).")
