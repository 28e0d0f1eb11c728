"""Hints: what an order may use of a request, apart from its sequence's own lengths and arrival."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hints:
    """Facts about a request before it runs; None: unknown. `OrderKind.needs` lists the hints that an order reads."""

    application: str | None = None
    """The application that made the request."""
    run: str | None = None
    """The application's run; None: the request is a run by itself."""
    unit: str | None = None
    """The unit of the application's demand graph."""
    application_arrival_s: float = 0.0
    """Arrival of the application's run, in seconds since the engine's run began."""
    client: str | None = None
    """Client that pays for the request."""
    service: str | None = None
    """The requested model, if several models share a queue."""
    deadline_s: float | None = None
    """When the last token is due, in seconds since the run began; infinite: no deadline."""
    output_tokens: int | None = None
    """Number of output tokens: true (an oracle) or predicted."""
    score: float | None = None
    """A ranker's score; the higher, the shorter the output."""
    prefill_s: float | None = None
    """Seconds of the prompt's prefill alone on the replica."""
    time_s: float | None = None
    """T': seconds from prefill to last token, alone on the replica."""
    service_time_s: float | None = None
    """L̂: the mean of `time_s` over its service's requests."""
    slack_s: float | None = None
    """Seconds for which others may pass the request in the queue without breaking a server's promise."""
    service_sd_s: float = 0.0
    """The standard deviation of `time_s` over its service's requests, in seconds."""


UNKNOWN = Hints()
"""Hints of a request about which nothing is known."""
