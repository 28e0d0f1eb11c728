"""Tuned: what a search over all policies answers."""

from dataclasses import dataclass
from typing import Any

from xcore.document import to_dict
from xcore.specs.estimate import Estimate
from xcore.specs.schedule import Schedule
from xscheduler.search import Search


@dataclass(frozen=True)
class Alternative:
    """A policy's best schedule under the bounds, or why it has none."""

    policy: str
    schedule: Schedule | None
    estimate: Estimate | None
    reason: str
    """By how much it loses and why, and what limits it; or what it can't meet."""
    clause: str = ""
    """The one clause of `reason` that says most; empty where that is all of it."""


@dataclass(frozen=True)
class Tuned:
    """The answer: the best schedule and its estimate (None where nothing is feasible), beside every policy's."""

    schedule: Schedule | None
    estimate: Estimate | None
    alternatives: tuple[Alternative, ...]
    search: Search
    """Summed over the policies."""
    lowest_latency_s: float | None
    """The lowest latency that any searched schedule reaches, where no schedule is feasible or it was asked for; None
    where not one sequence fits in memory.
    """
    assumptions: tuple[str, ...]
    best_on_engine: Alternative | None = None
    """The best schedule that the chosen engine runs; None where none that it runs is feasible, or none was picked."""
    rate_seq_s: float | None = None
    goodput_seq_s: float | None = None
    """The highest rate that the schedule sustains; None without a rate."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists and numbers."""
        return to_dict(self)
