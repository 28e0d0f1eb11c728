"""Events: the output of an engine's step."""

from dataclasses import dataclass

from xcore.requests.request import Result


@dataclass(frozen=True)
class Token:
    """One token of a request's output."""

    request_id: str
    index: int
    """Its index in the output, from 0."""
    token: int
    made_s: float
    """When it was made: seconds since the run began."""
    logprob: float | None = None
    """Its log-probability, if the request asks for it; -9999.0 for minus infinity."""
    likeliest: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens in its place, as many as the request asks for, with their log-probabilities."""
    start_s: float | None = None
    """When its request's prefill began; only with its first token."""
    prompt: tuple[tuple[float | None, tuple[tuple[int, float], ...]], ...] = ()
    """The log-probability and likeliest tokens of each prompt token, if asked for.

    Only with its request's first token.
    """


Event = Token | Result
"""A token, or the end of a request."""
