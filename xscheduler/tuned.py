"""Tuned: the answer of a search over all policies."""

from dataclasses import dataclass

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
    """The policy's distance to the best and its cause, and its limit; or the constraint that it can't meet."""
    clause: str = ""
    """The most informative clause of `reason`; empty if it has only one."""


@dataclass(frozen=True)
class Tuned:
    """The answer: the best schedule and its estimate (None if nothing is feasible), with the best of every policy."""

    schedule: Schedule | None
    estimate: Estimate | None
    alternatives: tuple[Alternative, ...]
    search: Search
    """The search cost, summed over the policies."""
    lowest_latency_s: float | None
    """The lowest latency that any searched schedule reaches; None if not one sequence fits in memory.

    Computed only if no schedule is feasible or the caller requested it.
    """
    assumptions: tuple[str, ...]
    best_on_engine: Alternative | None = None
    """The best schedule that the chosen engine runs; None if none of them is feasible, or no engine was chosen."""
    rate_seq_s: float | None = None
    goodput_seq_s: float | None = None
    """The highest rate that the schedule sustains; None without a rate."""

    def to_dict(self) -> dict[str, object]:
        """Return plain dicts, lists and numbers."""
        return to_dict(self)
