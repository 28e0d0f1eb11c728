"""A run through several schedules: one engine after the other, where layers move or a larger cache is needed."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from exegpt.request import Request, Result
from exegpt.schedule import Schedule
from exegpt.served import Served
from exegpt.timeline import Span, Timeline
from xrunner.adaptation import Change, Reschedule
from xrunner.engine import Engine, RunReport, blocks_needed


def run_adapting(
    engine: Engine,
    directory: str | Path,
    requests: Sequence[Request],
    reschedule: Reschedule,
    on_finish: Callable[[Result], None] | None = None,
    adjustment: float | None = None,
) -> tuple[Engine, RunReport]:
    """Run requests to their ends, under another schedule whenever their lengths have drifted; all ranks call it.

    Returns the engine that ended the run and the report of all of it. Times count from the beginning of the first
    engine's run.
    """
    whose = [list(range(len(requests)))]
    told: list[RunReport | None] = []
    while True:
        own = engine.run([requests[place] for place in whose[-1]], on_finish, reschedule, adjustment)
        told.append(own if engine.speaks else None)
        onward = engine.ranks.all((own.moving, own.left) if engine.speaks else None, Change)
        moving, left = next(one for one in onward if one)
        if not left:
            break
        whose.append([whose[-1][place] for place in left])
        engine = _onward(engine, directory, moving.schedule, [requests[place] for place in whose[-1]])
    # Each engine may have spoken on another rank. What they said is long: no rank hears it before all work is done.
    everyone = zip(*engine.ranks.all(tuple(told), RunReport), strict=True)
    return engine, _whole([next(one for one in engines if one) for engines in everyone], whose)


def _onward(engine: Engine, directory: str | Path, schedule: Schedule, left: Sequence[Request]) -> Engine:
    """The engine of the next schedule, with room for whoever is left: there may be longer ones than were observed."""
    blocks = max(schedule.kv_blocks, *(blocks_needed(request, schedule) for request in left))
    onward = replace(schedule, kv_blocks=blocks)
    if schedule.stages == engine.schedule.stages:
        return engine.again(onward)
    device = engine.model.device
    engine.close()
    return Engine.load(directory, onward, engine.ranks, engine.began, device)


def _whole(reports: Sequence[RunReport], whose: Sequence[Sequence[int]]) -> RunReport:
    """One report of all engines' runs, given the places of each one's requests."""
    results: list[Result] = []
    served: list[Served] = []
    spans: list[Span] = []
    changes: list[Change] = []
    moving: Change | None = None
    for report, places in zip(reports, whose, strict=True):
        if moving:
            changes.append(_with_pause(moving, spans, report.timeline.spans))
        results += report.results
        served += (replace(one, index=places[one.index]) for one in report.served)
        spans += report.timeline.spans
        changes += report.changes
        moving = report.moving
    timeline = Timeline("measured", tuple(sorted(spans, key=lambda span: span.start_s)))
    return RunReport(tuple(results), tuple(served), timeline, timeline.seconds, tuple(changes))


def _with_pause(change: Change, before: Sequence[Span], after: Sequence[Span]) -> Change:
    """A change of engine, with the moment at which the new one began to compute and the time without any work."""
    begins = min((span.start_s for span in after), default=0.0)
    return replace(change, changed_s=begins, pause_s=begins - max((span.end_s for span in before), default=begins))
