"""Runs of applications in a list of requests: which requests follow which, and how long each run takes."""

from collections.abc import Hashable, Iterable, Sequence

from xcore.specs.request_times import RequestTimes
from xcore.traces.labels import Labels
from xsimulator.replay.dependent_requests import After


def run_of(labels: Labels) -> Hashable:
    """Return the run that a request belongs to, by its labels; None for none."""
    return None if labels.run is None else (labels.client, labels.application, labels.run)


def dependencies(labels: Sequence[Labels]) -> list[After | None]:
    """Return for each request the one that it follows: its run's previous one, if it has a delay after it."""
    last: dict[Hashable, int] = {}
    after: list[After | None] = []
    for place, own in enumerate(labels):
        run = run_of(own)
        before = last.get(run)
        after.append(None if before is None or own.after_s is None else After(before, own.after_s))
        last[run] = place
    return after


def run_completions(labels: Sequence[Labels], served: Iterable[RequestTimes]) -> list[float]:
    """Return the seconds of each run, from its first arrival to its last end."""
    spans: dict[Hashable, tuple[float, float]] = {}
    for times in served:
        run = run_of(labels[times.index])
        begun_s, ended_s = spans.get(run, (times.arrival_s, times.finish_s))
        spans[run] = min(begun_s, times.arrival_s), max(ended_s, times.finish_s)
    return [ended_s - begun_s for run, (begun_s, ended_s) in spans.items() if run is not None]
