"""Adaptation: a new schedule during a run, when lengths have drifted from those that the current one was tuned for.

See section 5.2 of the paper and docs/theory.md.

The search runs in parallel with the run. If the new schedule has the same stages and needs no larger cache, it takes
over between two iterations, with all resident requests. Otherwise admission stops and the resident requests run to
completion.
The ranks then get another cache and, where layers move, other layers. Waiting requests continue there (`changes.py`).
No request is lost or restarted. Several replicas change together: the leader observes the lengths of its share
of the requests and sends changes to the followers (`replicas.py`).
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from xcore.specs.change import OF_ONE_ENGINE, Change, Reschedule
from xcore.specs.schedule import Schedule
from xrunner.core.drift import LengthDrift

T = TypeVar("T")


class Adaptation:
    """Observes a run's lengths and finds schedules for drifted ones.

    `held` is the schedule whose layers and caches the ranks hold. `broadcast` is called with every change. With
    `promises`, a schedule for other lengths takes over even if its decisions are the same: predictions are made from
    its lengths.
    """

    def __init__(
        self,
        held: Schedule,
        reschedule: Reschedule,
        broadcast: Callable[[Change], None] = lambda change: None,
        promises: bool = False,
    ):
        self.drift = LengthDrift(held.workload)
        self._held, self._running = held, held
        self._reschedule, self._broadcast, self._promises = reschedule, broadcast, promises
        self._search: Future[Schedule | None] | None = None
        self._drifted_s = 0.0

    def look(self, now: float) -> Change | None:
        """Return the next change to make: a new schedule for drifted lengths; None if there is none."""
        if self._search is None:
            observed = self.drift.observed()
            if observed:
                self._drifted_s = now
                self.drift.restart(observed)
                self._search = beside(lambda: self._reschedule(observed, self._held))
            return None
        if not self._search.done():
            return None
        schedule, self._search = self._search.result(), None
        if schedule is None or (same(schedule, self._running) and not self._promises):
            return None
        self._running = schedule
        change = Change(self._drifted_s, now, now, 0.0, schedule.stages != self._held.stages, schedule)
        self._broadcast(change)
        return change


def beside(work: Callable[[], T]) -> "Future[T]":
    """Run `work` in a daemon thread, and return its future result."""
    future: Future[T] = Future()

    def do() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=do, daemon=True).start()
    return future


def same(schedule: Schedule, other: Schedule) -> bool:
    """Return whether two schedules lead to the same decisions; their workloads may differ."""
    fixed = all(getattr(schedule, name) == getattr(other, name) for name in (*OF_ONE_ENGINE, "kv_blocks"))
    return fixed and schedule.control.decisions == other.control.decisions
