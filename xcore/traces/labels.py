"""Labels of a request: where it comes from and when it is due."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Labels:
    """The client, application, run and unit of a request, and its times, as far as they are known."""

    client: str | None = None
    application: str | None = None
    run: str | None = None
    unit: str | None = None
    deadline_s: float | None = None
    """Seconds after its arrival."""
    after_s: float | None = None
    """Seconds from the end of its run's previous request to its arrival."""
