"""`exegpt demo`: the whole way once, on this machine, with nothing else needed."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exegpt.cli import INFEASIBLE, options

if TYPE_CHECKING:
    import torch

    from exegpt.cli.inputs import Setting
    from exegpt.report.comparison import Comparison
    from exegpt.request import Request
    from xscheduler.tuned import Tuned

BUDGET_S = 75.0
"""What all runs together may take, as predicted: the number of requests follows from it."""
LEAST, MOST = 32, 1024
"""Requests that are run at least, however slow the machine, and at most."""


def demo(
    trace: Annotated[str | None, typer.Option("--trace", help="Take the lengths from this trace.")] = None,
    workload: options.WORKLOAD = None,
    latency_bound: Annotated[
        str | None,
        typer.Option(
            "--latency-bound",
            "-l",
            help=options.LATENCY_BOUND_HELP + " Default: a third of the way along the frontier.",
        ),
    ] = None,
    num: Annotated[
        int | None, typer.Option("--num", "-n", min=1, help="Requests. Default: as a minute allows.")
    ] = None,
    directory: Annotated[Path, typer.Option("--dir", help="Where everything goes.")] = Path("exegpt-demo"),
    columns: options.COLUMNS = None,
    seed: options.SEED = 0,
    device: options.DEVICE = None,
    dtype: options.RUN_DTYPE = None,
    threads: options.THREADS = None,
    json: options.JSON = False,
) -> int:
    """Make a small model, profile it, tune under a bound, run requests, and print predicted beside measured.

    Example: exegpt demo
    """
    from exegpt import document
    from exegpt.cli import inputs, output
    from exegpt.cli.answer import answer_document, infeasible_text, search_schedule
    from exegpt.cli.bench import compare_policies
    from exegpt.cli.shortlist import for_these
    from exegpt.duration import parse_duration
    from exegpt.errors import InputError
    from exegpt.models.device import find_device
    from exegpt.trace import parse_columns, parse_workload
    from xrunner.ranks import Ranks

    inputs.set_threads(threads)
    there = find_device(device)
    asked_bound = parse_duration(latency_bound) if latency_bound else None
    if trace and workload:
        raise InputError(f"Lengths are those of '{trace}' or of '{workload}': leave --trace or --workload out.")
    inputs.check_columns(columns, trace, workload)
    parse_workload(trace or workload or "T", parse_columns(columns) if columns else None)  # before minutes of work
    directory.mkdir(parents=True, exist_ok=True)
    model = create_demo_model(directory, seed)
    setting = _setting(model, trace or workload or "T", columns, there, dtype)
    frontier = _frontier(setting)
    bound_s = asked_bound or _third(frontier)
    answer = search_schedule(setting, bound_s)
    _print_search(setting, [*frontier, answer], bound_s)
    if answer.schedule is None:
        if json:
            output.emit(answer_document(answer, setting))
        output.note(infeasible_text(answer, bound_s))
        return INFEASIBLE
    ranked = sorted((a for a in answer.alternatives if a.schedule), key=lambda a: -a.estimate.throughput_tok_s)
    schedules = [a.schedule for a in ranked]
    requests = _requests(setting, schedules, num, seed)
    answer = for_these(answer, setting.profile, [request.lengths for request in requests])
    schedules.sort(key=lambda schedule: schedule is not answer.schedule)
    done = compare_policies(model, schedules, setting, requests, 1, Ranks(), there)
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


def _setting(model: Path, workload: str, columns: str | None, device: "torch.device", asked: str | None) -> "Setting":
    """The model on this machine's device with a measured profile: the stored one, else a new one."""
    from exegpt.cli import inputs, output
    from exegpt.model import ModelSpec
    from xprofiler import machine, store
    from xprofiler.measure import measure_profile

    spec, dtype = ModelSpec.from_directory(model), asked or ("fp32" if device.type == "cpu" else "bf16")
    if store.find(spec, dtype, machine.provenance(device)) is None:
        output.note("2. Measuring its layers on this machine …")
        with output.progress("measuring layers") as progress:
            measure_profile(model, dtype, lambda _, done, total: progress(done, total), device)
    setting = inputs.find_setting(str(model), "local", workload, dtype=dtype, columns=columns, device=device.type)
    for text in setting.assumptions:
        output.note(f"· {text}")
    return setting


def _frontier(setting: "Setting") -> "list[Tuned]":
    from exegpt.cli.answer import frontier_bounds, search_schedule

    return [search_schedule(setting, bound_s, lowest_latency=True) for bound_s in frontier_bounds(setting)]


def _third(frontier: "list[Tuned]") -> float:
    """A third of the way, by factors, from the lowest reachable latency to the unbounded optimum's; to two digits."""
    last = frontier[-1]
    if last.estimate is None or last.estimate.latency_s is None or last.lowest_latency_s is None:
        return math.inf
    low, high = last.lowest_latency_s, last.estimate.latency_s
    return float(f"{low * max(1.0, high / low) ** (1 / 3):.2g}")


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
    from exegpt.cli import output
    from exegpt.cli.bench import draw
    from xrunner.requests import random_requests
    from xsimulator.replay import replay

    context = setting.model.context
    if num is None:
        sample = draw(setting.workload, 128, seed, context)
        expected = sum(replay(schedule, setting.profile, sample).seconds for schedule in schedules)
        num = min(MOST, max(LEAST, round(len(sample) * BUDGET_S / expected)))
    output.note(f"3. Running {num} requests under each of {len(schedules)} schedules …")
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
    from exegpt.cli.execute import COMPARISON_COLUMNS, comparison_rows
    from exegpt.duration import format_duration

    output.table(COMPARISON_COLUMNS, comparison_rows(done), "Predicted for these very requests, and measured")
    best = done[0]
    if best.holds_bound is not None:
        word = "holds" if best.holds_bound else "misses"
        bound = format_duration(best.schedule.latency_bound_s or math.inf)
        print(
            f"{best.schedule.policy} {word} the bound of {bound}: measured {output.seconds(best.measured.latency_s)}."
        )
    print(f"Left in {directory}/: report.html (open it in a browser), schedule.json, trace.json (for ui.perfetto.dev).")
