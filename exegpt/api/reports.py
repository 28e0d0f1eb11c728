"""HTML reports of searches and of runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from exegpt.report.figures import estimate_rows
from exegpt.report.html import Report, page
from exegpt.report.stage_table import COLUMNS, stage_rows
from xcore import document
from xcore.console import output
from xcore.console.comparison import Comparison
from xcore.console.schedule_text import bound_text, schedule_text
from xcore.quantity import count_text, figure_text
from xscheduler.expert_divisions import divided_as
from xscheduler.setting_search import SearchOptions, frontier, frontier_bounds, ranked, search_schedule
from xscheduler.settings import Setting

if TYPE_CHECKING:
    from xscheduler.tuned import Tuned


def write_search_report(
    path: Path,
    setting: Setting,
    answers: "list[Tuned]",
    bounds_s: Sequence[float | None],
    options: SearchOptions,
    advice: Sequence[str] = (),
) -> None:
    """Write a report with the best schedule under each bound and the frontier, which is searched here."""
    more = [search_schedule(setting, b, **vars(options)) for b in frontier_bounds(setting, **vars(options))]
    best = next((answer for answer in reversed(answers) if answer.schedule), answers[-1])
    setting = divided_as(setting, best.schedule)
    assumptions = (*setting.assumptions, *best.assumptions)
    stages = (COLUMNS, *map(tuple, stage_rows(best.schedule, best.estimate))) if best.schedule else ()
    report = Report(
        "Schedules under a latency bound",
        (*_facts(setting), ("assumed", "; ".join(assumptions)), *_schedule_facts(best)),
        setting.workload,
        frontier([a for a in (*answers, *more) if a.estimate and a.estimate.latency_from == "start"]),
        bounds_s[-1],
        policies=_policies(best, setting),
        stages=stages,
        advice=tuple(advice),
    )
    document.write_text(path, page(report))


def write_run_report(
    path: Path,
    title: str,
    setting: Setting,
    comparisons: Sequence[Comparison],
    answers: "Sequence[Tuned] | None" = None,
    of_requests: "Tuned | None" = None,
) -> None:
    """Write a report of runs with the frontier of all policies: from `answers`, or searched here.

    `of_requests` is the answer for the requests that were run, if all policies were searched for them.
    """
    chosen = comparisons[0].schedule
    if answers is None:
        bounds_s = frontier_bounds(setting, bound=chosen.meaning)
        answers = [search_schedule(setting, bound_s, bound=chosen.meaning) for bound_s in bounds_s]
    facts = (*_facts(setting), ("bound", bound_text(chosen)), ("schedule", schedule_text(chosen)))
    report = Report(
        title,
        facts,
        setting.workload,
        frontier(list(answers)),
        chosen.latency_bound_s,
        tuple(comparisons),
        policies=_policies(of_requests, setting) if of_requests else (),
    )
    document.write_text(path, page(report))


def _schedule_facts(best: "Tuned") -> tuple[tuple[str, str], ...]:
    """Return the chosen schedule, its bound, and its predicted performance."""
    schedule, estimate = best.schedule, best.estimate
    if schedule is None or estimate is None:
        return (("schedule", "none meets the bounds"),)
    facts = (("bound", bound_text(schedule)), ("schedule", schedule_text(schedule)))
    return (*facts, *estimate_rows(estimate, schedule))


def _policies(answer: "Tuned", setting: Setting) -> tuple[tuple[str, ...], ...]:
    """Return the report's row of every policy."""
    rows = []
    for alternative in ranked(answer):
        e = alternative.estimate
        times = (e.latency_s, e.ttft_p99_s, e.tpot_p99_s) if e else (None,) * 3
        rate = output.number(e.throughput_tok_s if e else None)
        name = f"{alternative.policy} ({e.engine})" if e and setting.own else alternative.policy
        rows.append((name, rate, *map(output.seconds, times), alternative.reason))
    return tuple(rows)


def _facts(setting: Setting) -> tuple[tuple[str, str], ...]:
    """Return the setting that the schedule was searched for."""
    model, cluster, workload = setting.model, setting.cluster, setting.workload
    lengths = [f"{figure_text(side.mean, 4)}±{figure_text(side.std)}" for side in (workload.input, workload.output)]
    return (
        ("model", f"{model.name}: {model.layers} layers, {count_text(model.parameters)} parameters"),
        ("cluster", f"{cluster.name}: {cluster.devices} × {cluster.device.kind}"),
        ("workload", f"{workload.name}: input {lengths[0]}, output {lengths[1]} tokens"),
        ("profile", f"{setting.profile.source} ({setting.profile.fingerprint})"),
    )
