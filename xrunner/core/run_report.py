"""RunReport: the results of a run of a list of requests, gathered from all ranks."""

from collections.abc import Iterable
from dataclasses import dataclass

from xcore.requests.request import Result
from xcore.specs.change import Change
from xcore.specs.request_times import RequestTimes
from xcore.specs.timeline import Span, Timeline
from xrunner.comm.place import Place
from xrunner.comm.ranks import Ranks
from xrunner.core.driver import Driver
from xrunner.rank.worker import Worker


@dataclass(frozen=True)
class RunReport:
    """The results and measurements of a run. Times are in seconds since it began."""

    results: tuple[Result, ...]
    """In order of completion."""
    served: tuple[RequestTimes, ...]
    """The finished requests: neither cancelled nor failed."""
    timeline: Timeline
    seconds: float
    """Seconds from the beginning to the end of the last iteration."""
    changes: tuple[Change, ...] = ()
    """Schedules that took over while it ran."""
    left: tuple[int, ...] = ()
    """Places of the requests that continue under another engine."""
    moving: Change | None = None
    """The schedule of that engine."""
    preemptions: int = 0
    reused: int = 0
    """Prompt tokens that were found in the cache."""

    @staticmethod
    def gather(ranks: Ranks, worker: Worker, driver: Driver | None, results: Iterable[Result]) -> "RunReport":
        """Gather all ranks' results on the leader; all ranks call it.

        On other drivers, return what they leave.
        """
        spans_here = worker.spans or []
        served_here: tuple[list[RequestTimes], list[int], int, int] = ([], [], 0, 0)
        if driver:
            ledger = driver.ledger
            served_here = driver.outputs.served, driver.left, ledger.preemptions, ledger.reused
        parts = ranks.gather((spans_here, *served_here), Place(worker.place.schedule, 0).driver, Span, RequestTimes)
        spans: list[Span] = sorted((s for part, *_ in parts for s in part), key=lambda span: span.start_s)
        served = sorted((s for _, part, *_ in parts for s in part), key=lambda s: s.finish_s)
        left = tuple(sorted(place for _, _, part, *_ in parts for place in part))
        timeline = Timeline("measured", tuple(spans))
        changes, moving = (tuple(driver.changes), driver.moving) if driver else ((), None)
        counts = [sum(column) for column in list(zip(*parts, strict=True))[-2:]]
        return RunReport(tuple(results), tuple(served), timeline, timeline.seconds, changes, left, moving, *counts)
