"""`exegpt tune`: the schedule with the highest throughput under a latency bound."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exegpt.cli import INFEASIBLE, options

if TYPE_CHECKING:
    from exegpt.cli.inputs import Setting
    from xscheduler.tune import Tuned


def tune(
    latency_bound: Annotated[
        str, typer.Option("--latency-bound", "-l", help=options.LATENCY_BOUND_HELP + " Several give the frontier.")
    ],
    model: options.MODEL = None,
    cluster: options.CLUSTER = None,
    workload: options.WORKLOAD = None,
    profile: options.PROFILE = None,
    bound: options.BOUND = "p99-length",
    ttft: Annotated[str | None, typer.Option(help="Bound on the 99th percentile of the time to first token.")] = None,
    tpot: Annotated[str | None, typer.Option(help="Bound on the 99th percentile of the time per output token.")] = None,
    policy: options.POLICY = None,
    search: Annotated[str, typer.Option(help="bnb (branch and bound), exhaustive or optuna")] = "bnb",
    tolerance: Annotated[float, typer.Option(min=0.0, help="Monotonicity is trusted up to this share.")] = 0.0,
    dtype: options.DTYPE = None,
    kv_dtype: options.KV_DTYPE = None,
    memory_fraction: options.MEMORY_FRACTION = None,
    columns: options.COLUMNS = None,
    threads: options.THREADS = None,
    rate: options.RATE = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the schedule to this file.")] = None,
    export: Annotated[str | None, typer.Option(help="Print the nearest flags of another engine: vllm.")] = None,
    report: options.REPORT = None,
    json: options.JSON = False,
) -> int:
    """Find the schedule with the highest throughput under a latency bound.

    Example: exegpt tune --latency-bound 5s --model llama-3.1-8b --cluster 1xH100-SXM --workload 2048/256
    """
    from exegpt import document
    from exegpt.cli import inputs, output
    from exegpt.cli.answer import answer_document, search_schedule
    from exegpt.cli.export import ENGINES
    from exegpt.duration import parse_duration

    output.check_output(out)
    output.check_output(report)
    inputs.set_threads(threads)
    bounds = [parse_duration(part) for part in latency_bound.split(",")]
    inputs.check_choice(bound, ("p99-length", "p99-queries"), "--bound")
    inputs.check_choice(export or "vllm", ENGINES, "--export")
    inputs.check_choice(search, ("bnb", "exhaustive", "optuna"), "--search")
    asked = {
        "bound": bound,
        "ttft_s": parse_duration(ttft) if ttft else None,
        "tpot_s": parse_duration(tpot) if tpot else None,
        "policies": inputs.policy_names(policy),
        "method": search,
        "tolerance": tolerance,
    }
    nouns = (model, cluster, workload, profile)
    setting = inputs.find_setting(
        *nouns, dtype=dtype, kv_dtype=kv_dtype, memory_fraction=memory_fraction, columns=columns, rate=rate
    )
    answers = [search_schedule(setting, bound_s, **asked) for bound_s in bounds]
    best = next((a for a in reversed(answers) if a.schedule), None)
    if out and best:
        document.write(out, best.schedule)
    if report:
        _write_report(report, setting, answers, bounds, asked)
    if json:
        documents = [answer_document(answer, setting, export) for answer in answers]
        output.emit(documents[0] if len(documents) == 1 else {"frontier": documents})
    else:
        _print(answers, bounds, setting, out if best else None, export)
    return 0 if best else INFEASIBLE


def _print(
    answers: "list[Tuned]", bounds: list[float], setting: "Setting", out: Path | None, engine: str | None
) -> None:
    from exegpt.cli import output
    from exegpt.cli.answer import infeasible_text, policy_rows, print_plot, schedule_text
    from exegpt.cli.export import export
    from exegpt.duration import format_duration

    for text in dict.fromkeys([*setting.assumptions, *(a for answer in answers for a in answer.assumptions)]):
        output.note(f"· {text}")
    for answer, bound_s in zip(answers, bounds, strict=True):
        title = f"{setting.model.name} on {setting.cluster.name}, {setting.workload.name}, {format_duration(bound_s)}"
        output.table(["policy", "req/s", "tok/s", "latency", "schedule"], policy_rows(answer), title)
        if answer.schedule:
            print(f"Best: {schedule_text(answer.schedule)}")
            if engine:
                command, lost = export(answer.schedule, engine)
                print(f"Nearest in {engine} ({lost}):\n  {command}")
        else:
            output.note(infeasible_text(answer, bound_s))
        s = answer.search
        print(f"Search: {s.evaluations} of {s.space} schedules simulated in {s.seconds:.2f} s ({s.method}).\n")
    if len(answers) > 1:
        print_plot(answers, None)
    if out:
        print(f"Schedule written to {out}.")


def _write_report(
    path: Path, setting: "Setting", answers: "list[Tuned]", bounds: list[float], asked: dict[str, Any]
) -> None:
    from exegpt import document
    from exegpt.cli.answer import frontier, frontier_bounds, report_facts, schedule_text, search_schedule
    from exegpt.report.html import Report, page

    more = [search_schedule(setting, b, **asked) for b in frontier_bounds(setting, **asked)]
    best = next((a for a in reversed(answers) if a.schedule), None)
    facts = report_facts(setting) + ((("schedule", schedule_text(best.schedule)),) if best and best.schedule else ())
    bound_s = bounds[-1] if math.isfinite(bounds[-1]) else None
    report = Report("Schedules under a latency bound", facts, setting.workload, frontier([*answers, *more]), bound_s)
    document.write_text(path, page(report))
