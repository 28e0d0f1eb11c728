"""`exegpt tune`: the schedule with the highest throughput under a latency bound."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exegpt.cli import INFEASIBLE, options

if TYPE_CHECKING:
    from exegpt.cli.inputs import Setting
    from exegpt.schedule import Schedule
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
    rate: options.RATE = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the schedule to this file.")] = None,
    export: Annotated[str | None, typer.Option(help="Print the nearest flags of another engine: vllm.")] = None,
    report: options.REPORT = None,
    json: options.JSON = False,
) -> int:
    """Find the schedule with the highest throughput under a latency bound.

    Example: exegpt tune --latency-bound 5s --model llama-3.1-8b --cluster 1xH100-SXM --workload 2048/256
    """
    from exegpt.cli import inputs, output
    from exegpt.cli.export import ENGINES
    from exegpt.duration import parse_duration

    output.check_output(out)
    output.check_output(report)
    bounds = [parse_duration(part) for part in latency_bound.split(",")]
    inputs.check_choice(bound, ("p99-length", "p99-queries"), "--bound")
    if export:
        inputs.check_choice(export, ENGINES, "--export")
    inputs.check_choice(search, ("bnb", "exhaustive", "optuna"), "--search")
    asked = {
        "bound": bound,
        "ttft_s": parse_duration(ttft) if ttft else None,
        "tpot_s": parse_duration(tpot) if tpot else None,
        "policies": inputs.policy_names(policy),
        "method": search,
        "tolerance": tolerance,
    }
    setting = inputs.find_setting(
        model,
        cluster,
        workload,
        profile,
        dtype=dtype,
        kv_dtype=kv_dtype,
        memory_fraction=memory_fraction,
        columns=columns,
        rate=rate,
    )
    answers = [search_schedule(setting, bound_s, **asked) for bound_s in bounds]
    best = next((a for a in reversed(answers) if a.schedule), None)
    if out and best:
        from exegpt import document

        document.write(out, best.schedule)
    if report:
        _write_report(report, setting, answers, bounds, asked)
    if json:
        documents = [answer_document(answer, setting, export) for answer in answers]
        output.emit(documents[0] if len(documents) == 1 else {"frontier": documents})
    else:
        _print(answers, bounds, setting, out if best else None, export)
    return 0 if best else INFEASIBLE


def search_schedule(setting: "Setting", latency_bound_s: float, **asked: Any) -> "Tuned":
    """The best schedule for a setting under a bound in seconds (math.inf: none)."""
    from xscheduler.tune import tune as find

    bounded = latency_bound_s if math.isfinite(latency_bound_s) else None
    return find(
        setting.model,
        setting.cluster,
        setting.workload,
        setting.profile,
        latency_bound_s=bounded,
        kv_dtype=setting.kv_dtype,
        **asked,
    )


def answer_document(answer: "Tuned", setting: "Setting", engine: str | None = None) -> dict[str, Any]:
    """The object that `tune --json` prints for one bound; `engine` adds its flags under `export`."""
    from exegpt.cli import output
    from exegpt.cli.export import export
    from exegpt.document import to_dict

    document = {
        "schedule": to_dict(answer.schedule) if answer.schedule else None,
        "estimate": to_dict(answer.estimate) if answer.estimate else None,
        "alternatives": [
            {
                "policy": other.policy,
                "schedule": to_dict(other.schedule) if other.schedule else None,
                "estimate": to_dict(other.estimate) if other.estimate else None,
                "reason": other.reason,
            }
            for other in answer.alternatives
        ],
        "search": asdict(answer.search),
        "assumptions": [*setting.assumptions, *answer.assumptions],
        "provenance": output.provenance(setting.profile),
    }
    if answer.schedule is None:
        return document | {"lowest_latency_s": answer.lowest_latency_s}
    return document | ({"export": export(answer.schedule, engine)[0]} if engine else {})


def frontier(answers: "list[Tuned]") -> dict[str, tuple[tuple[float, float], ...]]:
    """Policy → the (latency in seconds, output tokens/s) of its best schedules under each answer's bound."""
    points: dict[str, set[tuple[float, float]]] = {}
    for answer in answers:
        for other in answer.alternatives:
            estimate = other.estimate
            if other.schedule and estimate and estimate.latency_s is not None:
                points.setdefault(other.policy, set()).add((estimate.latency_s, estimate.throughput_tok_s))
    return {policy: tuple(sorted(row)) for policy, row in sorted(points.items())}


def frontier_bounds(setting: "Setting", count: int = 7, **asked: Any) -> list[float]:
    """Bounds in seconds from just above the lowest reachable latency to that of the unbounded optimum."""
    import numpy as np

    free = search_schedule(setting, math.inf, **asked)
    if free.estimate is None or free.estimate.latency_s is None or free.lowest_latency_s is None:
        return [math.inf]
    low, high = 1.1 * free.lowest_latency_s, free.estimate.latency_s
    return [*np.geomspace(low, high, count).tolist(), math.inf] if low < high else [math.inf]


def schedule_text(schedule: "Schedule") -> str:
    """A schedule in one line: its policy and control variables."""
    names = ("encode_batch", "decode_iterations", "decode_batch", "max_num_seqs", "max_num_batched_tokens")
    own = [f"{name}={getattr(schedule, name)}" for name in (*names, "prefills_per_step") if getattr(schedule, name)]
    if schedule.tp_degree and schedule.tp_degree > 1:
        own.append(f"tp_degree={schedule.tp_degree}")
    if len(schedule.stages) > 1:
        own.append(f"stages={len(schedule.stages)}")
    return f"{schedule.policy} {' '.join(own)}"


def policy_rows(answer: "Tuned") -> list[list[str]]:
    """A table's rows: every policy's best schedule, the winner first."""
    from exegpt.cli import output

    rows = []
    ranked = sorted(answer.alternatives, key=lambda a: -(a.estimate.throughput_tok_s if a.schedule else -1.0))
    for other in ranked:
        if other.schedule is None or other.estimate is None:
            rows.append([other.policy, "–", "–", "–", other.reason])
            continue
        e = other.estimate
        figures = [output.number(e.throughput_seq_s), output.number(e.throughput_tok_s), output.seconds(e.latency_s)]
        rows.append([other.policy, *figures, schedule_text(other.schedule).split(" ", 1)[1]])
    return rows


def print_plot(answers: "list[Tuned]", bound_s: float | None) -> None:
    """The frontier of all policies, as far as the answers tell it."""
    from exegpt.report.terminal import plot

    points = frontier(answers)
    if sum(map(len, points.values())) > len(points):
        print(plot(points, bound_s))


def _print(
    answers: "list[Tuned]", bounds: list[float], setting: "Setting", out: Path | None, engine: str | None
) -> None:
    from exegpt.cli import output
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


def infeasible_text(answer: "Tuned", bound_s: float) -> str:
    """Why there is no schedule, in one sentence."""
    from exegpt.cli import output
    from exegpt.duration import format_duration

    if answer.lowest_latency_s is None:
        return "No schedule fits: not even one sequence fits in memory beside the weights."
    lowest = output.seconds(answer.lowest_latency_s)
    return f"No schedule meets the bound of {format_duration(bound_s)}: the lowest reachable latency is {lowest}."


def _write_report(
    path: Path, setting: "Setting", answers: "list[Tuned]", bounds: list[float], asked: dict[str, Any]
) -> None:
    from exegpt import document
    from exegpt.report.html import Report, page

    more = [search_schedule(setting, b, **asked) for b in frontier_bounds(setting, **asked)]
    best = next((a for a in reversed(answers) if a.schedule), None)
    facts = report_facts(setting) + ((("schedule", schedule_text(best.schedule)),) if best and best.schedule else ())
    bound_s = bounds[-1] if math.isfinite(bounds[-1]) else None
    report = Report("Schedules under a latency bound", facts, setting.workload, frontier([*answers, *more]), bound_s)
    document.write_text(path, page(report))


def report_facts(setting: "Setting") -> tuple[tuple[str, str], ...]:
    """What a schedule was found for, as a report names it."""
    model, workload = setting.model, setting.workload
    lengths = f"input {workload.input.mean:.0f}±{workload.input.std:.0f}, output {workload.output.mean:.0f}±"
    return (
        ("model", f"{model.name}: {model.layers} layers, {model.parameters / 1e9:.3g} billion parameters"),
        ("cluster", f"{setting.cluster.name}: {setting.cluster.devices} × {setting.cluster.device.kind}"),
        ("workload", f"{workload.name}: {lengths}{workload.output.std:.0f} tokens"),
        ("profile", f"{setting.profile.source} ({setting.profile.fingerprint})"),
    )
