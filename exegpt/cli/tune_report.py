"""The HTML report of `exegpt tune`."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exegpt.cli.inputs import Setting
    from xscheduler.tuned import Tuned


def write_report(
    path: Path,
    setting: "Setting",
    answers: "list[Tuned]",
    bounds: list[float],
    asked: dict[str, Any],
    advice: Sequence[str] = (),
) -> None:
    """Write what was found under each bound (seconds), and the frontier around it, which is searched here."""
    from exegpt import document
    from exegpt.cli.answer import frontier, frontier_bounds, report_facts, search_schedule
    from exegpt.report.html import Report, page
    from exegpt.report.stages import COLUMNS, stage_rows

    more = [search_schedule(setting, bound_s, **asked) for bound_s in frontier_bounds(setting, **asked)]
    best = next((one for one in reversed(answers) if one.schedule), answers[-1])
    told = (*setting.assumptions, *best.assumptions)
    facts = (*report_facts(setting), ("assumed", "; ".join(told)), *_found(best))
    stages = (COLUMNS, *map(tuple, stage_rows(best.schedule, best.estimate))) if best.schedule else ()
    report = Report(
        "Schedules under a latency bound",
        facts,
        setting.workload,
        frontier([one for one in (*answers, *more) if one.estimate and one.estimate.latency_from == "start"]),
        bounds[-1] if math.isfinite(bounds[-1]) else None,
        policies=_policies(best),
        stages=stages,
        advice=tuple(advice),
    )
    document.write_text(path, page(report))


def _found(best: "Tuned") -> tuple[tuple[str, ...], ...]:
    """The chosen schedule, its bound, and what it gives."""
    from exegpt.report.figures import estimate_rows
    from exegpt.report.schedule_text import bound_text, schedule_text

    schedule, estimate = best.schedule, best.estimate
    if schedule is None or estimate is None:
        return (("schedule", "none meets the bounds"),)
    rows = estimate_rows(estimate, schedule)
    return (("bound", bound_text(schedule)), ("schedule", schedule_text(schedule)), *map(tuple, rows))


def _policies(answer: "Tuned") -> tuple[tuple[str, ...], ...]:
    """The report's row of every policy."""
    from exegpt.cli import output
    from exegpt.cli.answer import ranked

    rows = []
    for one in ranked(answer):
        e = one.estimate
        times = (e.latency_s, e.ttft_p99_s, e.tpot_p99_s) if e else (None,) * 3
        rate = output.number(e.throughput_tok_s if e else None)
        rows.append((one.policy, rate, *map(output.seconds, times), one.reason))
    return tuple(rows)
