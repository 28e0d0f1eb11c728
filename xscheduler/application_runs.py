"""Runs of applications in a list of requests: which requests follow which, and how long each run takes."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from xcore.specs.request_times import RequestTimes
from xcore.traces.trace import AFTER
from xsimulator.replay.dependent_requests import After

Labels = Mapping[str, Any]
"""A request's labels, as `read_labels` reads them."""


def run_of(labels: Labels) -> Hashable:
    """Return the run that a request belongs to, by its labels; None for none."""
    run = labels.get("run")
    return None if run is None else (labels.get("client"), labels.get("application"), run)


def dependencies(labels: Sequence[Labels]) -> list[After | None]:
    """Return for each request the one that it follows: its run's previous one, if it has a delay after it."""
    last: dict[Hashable, int] = {}
    after: list[After | None] = []
    for place, own in enumerate(labels):
        run = run_of(own)
        before = last.get(run) if AFTER in own else None
        after.append(None if before is None else After(before, own[AFTER]))
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
