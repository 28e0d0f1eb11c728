"""`exegpt tune`: the schedule with the highest throughput under a latency bound."""

import gc
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exegpt.cli import INFEASIBLE, options
from exegpt.errors import InputError

if TYPE_CHECKING:
    from exegpt.cli.export import Target
    from exegpt.cli.inputs import Setting
    from exegpt.model import ModelSpec
    from exegpt.price import Prices
    from xscheduler.tuned import Tuned


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
    arrivals: Annotated[
        str, typer.Option(help="How requests arrive: poisson, at --rate, or as in the trace, quickened to --rate.")
    ] = "poisson",
    price: Annotated[
        Path | None, typer.Option(help="YAML: device kind → price per device-hour. The cheapest cluster is the answer.")
    ] = None,
    seed: options.SEED = 0,
    advice: Annotated[
        bool | None,
        typer.Option(
            "--advice/--no-advice",
            help="What a looser bound and other clusters would give. Default: for one bound on at most eight devices.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the schedule to this file.")] = None,
    export: Annotated[str | None, typer.Option(help="Print the nearest flags of another engine: vllm.")] = None,
    report: options.REPORT = None,
    json: options.JSON = False,
) -> int:
    """Find the schedule with the highest throughput under a latency bound.

    Example: exegpt tune --latency-bound 5s --model llama-3.1-8b --cluster 1xH100-SXM --workload 2048/256

    With --rate, requests arrive over time and latency counts from arrival. Several clusters, separated by commas, are
    compared by --price.
    """
    from exegpt import document
    from exegpt.cli import inputs, output
    from exegpt.cli.answer import advise, answer_document, search_schedule
    from exegpt.cli.export import ENGINES
    from exegpt.cli.rated import PATTERNS
    from exegpt.duration import parse_duration
    from exegpt.price import read_prices

    output.check_output(out)
    output.check_output(report)
    inputs.set_threads(threads)
    bounds = [parse_duration(part) for part in latency_bound.split(",")]
    inputs.check_choice(bound, ("p99-length", "p99-queries"), "--bound")
    inputs.check_choice(export or "vllm", ENGINES, "--export")
    inputs.check_choice(search, ("bnb", "exhaustive", "optuna"), "--search")
    inputs.check_choice(arrivals, PATTERNS, "--arrivals")
    asked = {
        "bound": bound,
        "ttft_s": parse_duration(ttft) if ttft else None,
        "tpot_s": parse_duration(tpot) if tpot else None,
        "policies": inputs.policy_names(policy),
        "method": search,
        "tolerance": tolerance,
    }
    prices = read_prices(price) if price else None
    clusters = cluster.split(",") if cluster else [None]
    open_system = rate is not None or arrivals == "trace"
    _check_combination(len(bounds), len(clusters), open_system, prices is not None)
    settings = [
        inputs.find_setting(
            *(model, where, workload, profile),
            dtype=dtype,
            kv_dtype=kv_dtype,
            memory_fraction=memory_fraction,
            columns=columns,
            rate=rate,
        )
        for where in clusters
    ]
    target = _target(export, settings[0].model, model)
    if open_system:
        return _at_rate(settings, bounds[0], rate, arrivals, seed, prices, asked, out, target, report, json)
    setting = settings[0]
    gc.disable()  # searches leave many small objects and no cycles; the command ends soon
    answers = [search_schedule(setting, bound_s, **asked) for bound_s in bounds]
    best = next((a for a in reversed(answers) if a.schedule), None)
    if out and best:
        document.write(out, best.schedule)
    wanted = advice if advice is not None else len(bounds) == 1 and setting.cluster.devices <= 8
    told = [advise(setting, a, b, asked) if wanted else [] for a, b in zip(answers, bounds, strict=True)]
    if report:
        _write_report(report, setting, answers, bounds, asked, told[-1])
    if json:
        documents = [answer_document(a, setting, target) | {"advice": t} for a, t in zip(answers, told, strict=True)]
        output.emit(documents[0] if len(documents) == 1 else {"frontier": documents})
    else:
        _print(answers, bounds, told, setting, out if best else None, target)
    return 0 if best else INFEASIBLE


def _target(engine: str | None, spec: "ModelSpec", typed: str | None) -> "Target | None":
    """The engine whose flags are asked for; InputError where it can't run the model."""
    from exegpt.cli.export import Target, check_exportable

    if engine is None:
        return None
    check_exportable(spec, engine)
    return Target(engine, typed if typed and Path(typed).is_dir() else None)


def _check_combination(bounds: int, clusters: int, open_system: bool, priced: bool) -> None:
    """InputError for options that don't go together."""
    if clusters > 1 and not open_system:
        raise InputError("Several clusters are compared at a rate of arrival: add --rate, like --rate 5/s.")
    if priced and not open_system:
        raise InputError("Prices are compared at a rate of arrival: add --rate, like --rate 5/s.")
    if open_system and bounds > 1:
        raise InputError("A rate of arrival takes one latency bound: name one, or leave --rate out for the frontier.")


def _at_rate(
    settings: "list[Setting]",
    bound_s: float,
    rate: str | None,
    pattern: str,
    seed: int,
    prices: "Prices | None",
    asked: dict[str, Any],
    out: Path | None,
    target: "Target | None",
    report: Path | None,
    json: bool,
) -> int:
    """The answer for requests that arrive over time, on the cheapest cluster."""
    from exegpt import document
    from exegpt.cli import output, rated
    from exegpt.price import price_per_hour
    from xscheduler.goodput import Bounds

    for setting in settings:
        if prices is not None:
            price_per_hour(prices, setting.cluster)  # a missing price is said before the work
    per_second = rated.asked_rate(settings[0].workload, rate)
    latency_s = bound_s if math.isfinite(bound_s) else None
    bounds = Bounds(latency_s, asked["ttft_s"], asked["tpot_s"])
    offers = [rated.offer(one, bounds, per_second, pattern, seed, prices, asked) for one in settings]
    offers.sort(key=lambda one: one.order)
    best = offers[0]
    schedule = best.rated.tuned.schedule
    if out and schedule:
        document.write(out, schedule)
    if report:
        _write_report(report, best.setting, [best.rated.tuned], [bound_s], asked)
    if json:
        output.emit(rated.offers_document(offers, target, seed))
    else:
        if len(offers) > 1 and prices is None:
            output.note("· no prices: clusters by their number of devices; --price FILE compares what they cost")
        rated.print_offers(offers, bound_s, target, out)
    return 0 if schedule else INFEASIBLE


def _print(
    answers: "list[Tuned]",
    bounds: list[float],
    told: list[list[str]],
    setting: "Setting",
    out: Path | None,
    target: "Target | None",
) -> None:
    from exegpt.cli import output
    from exegpt.cli.answer import infeasible_text, policy_rows, print_export, print_plot, ranked, schedule_text
    from exegpt.duration import format_duration

    for text in dict.fromkeys([*setting.assumptions, *(a for answer in answers for a in answer.assumptions)]):
        output.note(f"· {text}")
    for answer, bound_s, advice in zip(answers, bounds, told, strict=True):
        title = f"{setting.model.name} on {setting.cluster.name}, {setting.workload.name}, {format_duration(bound_s)}"
        output.table(["policy", "req/s", "tok/s", "latency", "schedule"], policy_rows(answer), title)
        if answer.schedule:
            print(f"Best: {schedule_text(answer.schedule)}")
            for other in ranked(answer):
                if other.schedule:
                    print(f"  {other.policy}: {other.reason}")
            if target:
                print_export(answer.schedule, target)
        else:
            output.note(infeasible_text(answer, bound_s))
        if advice:
            print("Advice:" + "".join(f"\n  {text}" for text in advice))
        s = answer.search
        print(f"Search: {s.evaluations} of {s.space} schedules simulated in {s.seconds:.2f} s ({s.method}).\n")
    if len(answers) > 1:
        print_plot(answers, None)
    if out:
        print(f"Schedule written to {out}.")


def _write_report(
    path: Path,
    setting: "Setting",
    answers: "list[Tuned]",
    bounds: list[float],
    asked: dict[str, Any],
    told: Sequence[str] = (),
) -> None:
    from exegpt import document
    from exegpt.cli import output
    from exegpt.cli.answer import frontier, frontier_bounds, ranked, report_facts, schedule_text, search_schedule
    from exegpt.report.html import Report, page
    from exegpt.report.stages import COLUMNS, stage_rows

    more = [search_schedule(setting, b, **asked) for b in frontier_bounds(setting, **asked)]
    best = next((a for a in reversed(answers) if a.schedule), answers[-1])
    facts, stages = report_facts(setting), ()  # type: tuple[tuple[str, str], ...], tuple[tuple[str, ...], ...]
    if best.schedule:
        facts += (("schedule", schedule_text(best.schedule)),)
        stages = (COLUMNS, *map(tuple, stage_rows(best.schedule, best.estimate)))
    report = Report(
        "Schedules under a latency bound",
        facts,
        setting.workload,
        frontier([a for a in (*answers, *more) if a.estimate and a.estimate.latency_from == "start"]),
        bounds[-1] if math.isfinite(bounds[-1]) else None,
        policies=tuple(
            (
                a.policy,
                output.number(a.estimate.throughput_tok_s if a.estimate else None),
                output.seconds(a.estimate.latency_s if a.estimate else None),
                a.reason,
            )
            for a in ranked(best)
        ),
        stages=stages,
        advice=tuple(told),
    )
    document.write_text(path, page(report))
