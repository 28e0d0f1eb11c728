"""Adaptation: another schedule while running, when lengths have drifted from those for which the current one was tuned
(paper section 5.2; docs/theory.md).

The search runs in parallel. Where the new schedule has the same stages and needs no larger cache it takes over between
two iterations, with all residents. Otherwise admission stops, the residents run to their ends, the ranks get another
cache and, where layers move, other layers, and waiting requests continue there (`changes.py`): no request is lost or
restarted. Several replicas change together: the leader follows the lengths of its own share of the requests and sends
changes to the followers (`replicas.py`).
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from xcore.specs.change import OF_ONE_ENGINE, Change, Reschedule
from xcore.specs.schedule import Schedule
from xrunner.core.drift import Drift

T = TypeVar("T")


class Adaptation:
    """Follows a run's lengths and finds schedules for drifted ones. `held` is the schedule whose layers and caches the
    ranks hold; `broadcast` is called with every change. With `promises`, a schedule of other lengths takes over though
    it leads to the same decisions: somebody predicts by them.
    """

    def __init__(
        self,
        held: Schedule,
        reschedule: Reschedule,
        broadcast: Callable[[Change], None] = lambda change: None,
        promises: bool = False,
    ):
        self.drift = Drift(held.workload)
        self._held, self._running = held, held
        self._reschedule, self._broadcast, self._promises = reschedule, broadcast, promises
        self._search: Future[Schedule | None] | None = None
        self._drifted_s = 0.0

    def look(self, now: float) -> Change | None:
        """The next change to make: a new schedule for drifted lengths; None while there is none."""
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
    """The future result of `work` in a daemon thread."""
    future: Future[T] = Future()

    def do() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=do, daemon=True).start()
    return future


def same(schedule: Schedule, other: Schedule) -> bool:
    """Whether two schedules lead to the same decisions; their workloads may differ."""
    fixed = all(getattr(schedule, name) == getattr(other, name) for name in (*OF_ONE_ENGINE, "kv_blocks"))
    return fixed and schedule.control.decisions == other.control.decisions
