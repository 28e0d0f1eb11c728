"""A change of the schedule while it runs (paper section 5.2)."""

from dataclasses import dataclass

from exegpt.noun import Noun
from exegpt.schedule import Schedule


@dataclass(frozen=True)
class Change(Noun):
    """One change of schedule. Seconds since the run began."""

    drifted_s: float
    """When the drift was detected."""
    found_s: float
    """When the search ended."""
    changed_s: float
    """When it took over."""
    pause_s: float
    """For how long nothing was computed."""
    moved: bool
    """Whether layers moved to other ranks."""
    schedule: Schedule
    refused: str | None = None
    """Why the ranks refused it and kept their schedule; None: they took it."""
