"""A change of the schedule during a run (paper section 5.2)."""

from collections.abc import Callable
from dataclasses import dataclass

from xcore.policies.from_schedule import most_prompts
from xcore.spec import Spec
from xcore.specs.schedule import Schedule
from xcore.specs.workload import Workload


@dataclass(frozen=True)
class Change(Spec):
    """One change of schedule. Times are in seconds since the run began."""

    drifted_s: float
    """When the drift was detected."""
    found_s: float
    """When the search ended."""
    changed_s: float
    """When the new schedule took over."""
    pause_s: float
    """Seconds in which nothing was computed."""
    moved: bool
    """Whether layers moved to other ranks."""
    schedule: Schedule
    refused: str | None = None
    """Why the ranks refused it and kept their schedule; None: they accepted it."""


Reschedule = Callable[[Workload, Schedule], Schedule | None]
"""Return the best schedule for a workload that the held layers and caches can run; None if none keeps the bound."""


OF_ONE_ENGINE = (
    *("policy", "stages", "replicas", "dtype", "kv_dtype"),
    *("block_size", "admission", "prefix_caching", "speculation"),
)
"""Fields of a schedule that are fixed when an engine is made."""


def takes_over_in_place(new: Schedule, held: Schedule) -> bool:
    """Return whether a schedule can take over with the held layers and caches.

    Disaggregated encoding ranks have room for one batch of the held schedule.
    """
    if any(getattr(new, name) != getattr(held, name) for name in OF_ONE_ENGINE):
        return False
    larger = held.traits.disaggregated and (most_prompts(new) or 0) > (most_prompts(held) or 0)
    return new.kv_blocks <= held.kv_blocks and not larger
