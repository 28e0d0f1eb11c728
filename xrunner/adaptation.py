"""Adaptation: another schedule while running, when lengths have left those that the present one was found for (paper
section 5.2; docs/theory.md).

The search runs beside the run, in a thread. Where the new schedule has the same stages it takes over between two
iterations, and residents notice nothing. Where layers move to other ranks, nobody is admitted any more, the residents
come to their ends, every rank reads its new layers, and those who waited go on there (`changes.py`): nobody is lost,
and nobody starts again.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from exegpt.schedule import Schedule
from exegpt.workload import Workload
from xrunner.drift import Drift

Reschedule = Callable[[Workload], Schedule | None]
"""The best schedule for a workload; None where none meets the bound."""


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


class Adaptation:
    """Looks after a run's lengths, and finds the schedules for others."""

    def __init__(self, schedule: Schedule, reschedule: Reschedule, drift: Drift | None = None):
        self.schedule = schedule
        self.drift = drift or Drift(schedule.workload)
        self._reschedule = reschedule
        self._threads = ThreadPoolExecutor(1)
        self._search: Future[Schedule | None] | None = None
        self._drifted_s = 0.0

    def look(self, now: float) -> Change | None:
        """A change, once a better schedule has been found for lengths that have drifted; it has yet to be made."""
        if self._search is None:
            seen = self.drift.observed()
            if seen:
                self._drifted_s = now
                self.drift.restart(seen)
                self._search = self._threads.submit(self._reschedule, seen)
            return None
        if not self._search.done():
            return None
        found, self._search = self._search.result(), None
        if found is None or same(found, self.schedule):
            return None
        self.schedule = found
        return Change(self._drifted_s, now, now, 0.0, False, found)

    def close(self) -> None:
        """Let an unfinished search go."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def same(one: Schedule, other: Schedule) -> bool:
    """Whether two schedules decide alike, whatever workload they were found for."""
    names = ("policy", "encode_batch", "decode_iterations", "micro_batches", "encode_micro_batches", "max_num_seqs")
    names += ("max_num_batched_tokens", "prefills_per_step", "replicas", "stages")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def takes_over_in_place(new: Schedule, old: Schedule) -> bool:
    """Whether a schedule can take over on the same ranks, layers and caches: encoding ranks of their own hold no more
    than one batch of the old one.
    """
    if (new.policy, new.stages, new.replicas) != (old.policy, old.stages, old.replicas):
        return False
    apart = any(stage.phase == "encode" for stage in old.stages)
    return not apart or (new.encode_batch or 0) <= (old.encode_batch or 0)
