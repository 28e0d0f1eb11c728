"""A run through several schedules: one engine after the other, where layers move or a larger cache is needed."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from xcore.batching.kv_capacity import grow_to_fit
from xcore.requests.request import Request, Result
from xcore.specs.change import Change, Reschedule
from xcore.specs.request_times import RequestTimes
from xcore.specs.schedule import Schedule
from xcore.specs.timeline import Span, Timeline
from xrunner.comm.ranks import Agreed
from xrunner.core.engine import Engine
from xrunner.core.run_report import RunReport


def run_adapting(
    engine: Engine,
    directory: str | Path,
    requests: Sequence[Request],
    reschedule: Reschedule,
    on_finish: Callable[[Result], None] | None = None,
) -> tuple[Engine, RunReport]:
    """Run requests to completion, under another schedule whenever their lengths have drifted; all ranks call it.

    Returns:
        The engine that ended the run, and the report of the whole run. Times count from the beginning of the first
        engine's run.
    """
    whose = [list(range(len(requests)))]
    reports: list[RunReport | None] = []
    refused: list[str | None] = []
    while True:
        report = engine.run([requests[place] for place in whose[-1]], on_finish, reschedule)
        reports.append(report if engine.leads else None)
        onward = engine.ranks.all((report.moving, report.left) if engine.leads else None, Change)
        moving, left = next(answer for answer in onward if answer)
        if not left:
            break
        assert moving, "the requests that are left continue under a change"
        whose.append([whose[-1][place] for place in left])
        engine, why_not = _onward(engine, directory, moving.schedule, [requests[place] for place in whose[-1]])
        refused.append(why_not)
    # Another rank may have led each engine. Reports are long: none is sent before all work is done.
    everyone = zip(*engine.ranks.all(tuple(reports), RunReport), strict=True)
    return engine, _whole([next(report for report in of_ranks if report) for of_ranks in everyone], whose, refused)


def _onward(
    engine: Engine, directory: str | Path, schedule: Schedule, left: Sequence[Request]
) -> tuple[Engine, str | None]:
    """Return the engine of the next schedule, with KV blocks for all remaining requests.

    There may be longer requests than were observed. If the ranks can't run the schedule, return an engine of the old
    schedule and the reason.
    """
    try:
        return engine.onward(directory, grow_to_fit(schedule, left)), None
    except Agreed as error:
        why_not = str(error)
    # The old schedule gets the observed lengths as its workload, so that their drift triggers no further search.
    return engine.onward(directory, replace(engine.schedule, workload=schedule.workload)), why_not


def _whole(reports: Sequence[RunReport], whose: Sequence[Sequence[int]], refused: Sequence[str | None]) -> RunReport:
    """Return one report of all engines' runs.

    `whose` are the places of each engine's requests. `refused` are the reasons why changes were refused.
    """
    results: list[Result] = []
    served: list[RequestTimes] = []
    spans: list[Span] = []
    changes: list[Change] = []
    for number, (report, places) in enumerate(zip(reports, whose, strict=True)):
        if number:
            change = reports[number - 1].moving
            assert change, "an engine goes on where a change was found"
            change = replace(change, refused=refused[number - 1])
            changes.append(_with_pause(change, spans, report.timeline.spans))
        results += report.results
        served += (replace(request, index=places[request.index]) for request in report.served)
        spans += report.timeline.spans
        changes += report.changes
    timeline = Timeline("measured", tuple(sorted(spans, key=lambda span: span.start_s)))
    preemptions = sum(report.preemptions for report in reports)
    reused = sum(report.reused for report in reports)
    return RunReport(
        *(tuple(results), tuple(served), timeline, timeline.seconds, tuple(changes)),
        preemptions=preemptions,
        reused=reused,
    )


def _with_pause(change: Change, before: Sequence[Span], after: Sequence[Span]) -> Change:
    """Return a change of engine, completed with its times.

    These are the time when the new engine began to compute, and the time without any work.
    """
    begins = min((span.start_s for span in after), default=0.0)
    return replace(change, changed_s=begins, pause_s=begins - max((span.end_s for span in before), default=begins))
