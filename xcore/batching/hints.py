"""Hints: what an order may know of a request beside its sequence's own lengths and arrival."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hints:
    """What is known of a request before it runs; None: not known. `OrderKind.needs` says which of it an order reads."""

    application: str | None = None
    """The application that made the request."""
    application_arrival_s: float = 0.0
    """When that arrived, in seconds since the run began."""
    client: str | None = None
    """Who pays for the request."""
    service: str | None = None
    """The model that it asks for, where several share a queue."""
    deadline_s: float | None = None
    """When its last token is due, in seconds since the run began; endless: no deadline."""
    output_tokens: int | None = None
    """How many tokens it makes: true (an oracle) or predicted."""
    score: float | None = None
    """A ranker's; the higher, the shorter the output."""
    prefill_s: float | None = None
    """What its prompt's prefill takes alone, in seconds."""
    time_s: float | None = None
    """T': what it takes alone from its prefill to its last token, in seconds."""
    service_time_s: float | None = None
    """L̂: the mean of `time_s` over its service's requests."""
    service_sd_s: float = 0.0
    """The standard deviation of the same, in seconds."""


UNKNOWN = Hints()
"""Nothing is known."""
