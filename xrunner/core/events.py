"""Events: what comes of a step of the engine."""

from dataclasses import dataclass

from xcore.requests.request import Result


@dataclass(frozen=True)
class Token:
    """One token of a request's output."""

    request_id: str
    index: int
    """Its place in the output, from 0 on."""
    token: int
    made_s: float
    """When it was made: seconds since the run began."""
    logprob: float | None = None
    """Its log-probability, where the request asks for it; -9999.0 for minus infinity."""
    likeliest: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens in its place, as many as the request asks for, with their log-probabilities."""
    start_s: float | None = None
    """When its request's encoding began: with its first token alone."""
    prompt: tuple[tuple[float | None, tuple[tuple[int, float], ...]], ...] = ()
    """The same of each token of the prompt, where the request asks for it: with its first token alone."""


Event = Token | Result
"""A token, or the end of a request."""
