"""Adaptation: another schedule while running, when lengths have left those that the present one was found for (paper
section 5.2; docs/theory.md).

The search runs beside the run. Where the new schedule has the same stages and needs no larger cache it takes over
between two iterations, and residents notice nothing. Else nobody is admitted any more, the residents come to their
ends, the ranks get another cache and, where layers move, other layers, and those who waited go on there
(`changes.py`): nobody is lost, and nobody starts again. Several replicas change together: the first one's driver looks
after lengths, of its own share of the requests, and tells the others (`replicas.py`).
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from exegpt.policies import traits_of
from exegpt.schedule import Schedule
from exegpt.workload import Workload
from xrunner.core.drift import Drift

T = TypeVar("T")

Reschedule = Callable[[Workload, Schedule], Schedule | None]
"""The best schedule for a workload, given the one that the ranks hold layers and caches for; None where none meets the
bound.
"""


@dataclass(frozen=True)
class Change:
    """One change of schedule. Seconds since the run began."""

    drifted_s: float
    """When the drift was noticed."""
    found_s: float
    """When the new schedule had been found."""
    changed_s: float
    """When it took over."""
    pause_s: float
    """For how long nothing was computed."""
    moved: bool
    """Whether layers moved to other ranks."""
    schedule: Schedule
    refused: str | None = None
    """Why the ranks couldn't take it, where they went on under the schedule that they had."""


class Adaptation:
    """Looks after a run's lengths, and finds the schedules for others: `held` is what the ranks have layers and caches
    for, and `tell` gets every change.
    """

    def __init__(self, held: Schedule, reschedule: Reschedule, tell: Callable[[Change], None] = lambda change: None):
        self.drift = Drift(held.workload)
        self._held, self._running = held, held
        self._reschedule, self._tell = reschedule, tell
        self._search: Future[Schedule | None] | None = None
        self._drifted_s = 0.0

    def look(self, now: float) -> Change | None:
        """A change, once another schedule has been found for lengths that have drifted; it has yet to be made."""
        if self._search is None:
            seen = self.drift.observed()
            if seen:
                self._drifted_s = now
                self.drift.restart(seen)
                self._search = beside(lambda: self._reschedule(seen, self._held))
            return None
        if not self._search.done():
            return None
        found, self._search = self._search.result(), None
        if found is None or same(found, self._running):
            return None
        self._running = found
        change = Change(self._drifted_s, now, now, 0.0, found.stages != self._held.stages, found)
        self._tell(change)
        return change


def beside(work: Callable[[], T]) -> "Future[T]":
    """What comes of work in a thread, for which the process doesn't wait when it ends."""
    coming: Future[T] = Future()

    def do() -> None:
        try:
            coming.set_result(work())
        except BaseException as error:
            coming.set_exception(error)

    threading.Thread(target=do, daemon=True).start()
    return coming


def same(one: Schedule, other: Schedule) -> bool:
    """Whether two schedules decide alike, whatever workload they were found for."""
    variables = {*traits_of(one).searched, "micro_batches", "encode_micro_batches"}  # these two hold under every policy
    names = ("policy", *variables, "replicas", "stages", "kv_blocks")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def takes_over_in_place(new: Schedule, held: Schedule) -> bool:
    """Whether a schedule can take over with the layers and caches that the ranks hold for another: encoding ranks of
    their own hold no more than one batch of that one.
    """
    if (new.policy, new.stages, new.replicas) != (held.policy, held.stages, held.replicas):
        return False
    disaggregated = any(stage.phase == "encode" for stage in held.stages)
    return new.kv_blocks <= held.kv_blocks and not (
        disaggregated and (new.encode_batch or 0) > (held.encode_batch or 0)
    )
