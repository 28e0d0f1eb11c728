"""Answered: a finished API request, as metrics, the log and the status page count it, without text and token ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from xserver.admission.admission_control import Promise
from xserver.http.generation import Choice

Outcome = Literal["answered", "failed", "cancelled", "rejected", "invalid"]
"""The result of a request.

Rejected: 429 and 503. Invalid: a request that can't be answered. Cancelled: the client has disconnected or reads
nothing.
"""
Kind = Literal["usual", "long", "joined", "none"]
"""The class of a request.

Long: outside the bound. Joined: the answer of a request with the same Idempotency-Key. None: never admitted.
"""
MissReason = Literal["restart", "reschedule", "preempted", "mispredicted"]
"""Why a request missed the bound."""


@dataclass(frozen=True)
class Answered:
    """A finished request; times are in seconds, and None if a time doesn't exist or isn't known."""

    request_id: str
    model: str | None
    """None: the request reached none of several models."""
    path: str
    status: int
    outcome: Outcome
    kind: Kind
    code: str | None
    """The code of the error."""
    ended_s: float
    """The end, by the monotonic clock."""
    latency_s: float
    """From the last byte of the body read to the last byte of the answer given to the transport."""
    ttft_s: float | None = None
    """Seconds until the first token of any of its sequences."""
    tpot_s: tuple[float, ...] = ()
    """Seconds per further token, of each sequence."""
    queue_wait_s: float | None = None
    """Seconds until the last of its sequences has started."""
    wait_error_s: float | None = None
    """Measured minus predicted start."""
    end_error_s: float | None = None
    """Measured minus predicted end, for the actual number of tokens."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    looked_up_tokens: int = 0
    """Prompt tokens of its sequences that began, if prefixes are cached."""
    cached_tokens: int = 0
    """Prompt tokens that were in the cache."""
    bound_s: float | None = None
    """The bound in seconds; None: not under the bound."""
    miss: MissReason | None = None
    client_id: str | None = None
    """The X-Request-Id that the client has given."""

    @property
    def text(self) -> str:
        """The request as a line of the log."""
        error = f" ({self.code})" if self.code else ""
        tokens = f", {self.prompt_tokens} + {self.output_tokens} tokens" if self.prompt_tokens else ""
        missed = f", bound missed: {self.miss}" if self.miss else ""
        what = f"{self.path} {self.model}" if self.model else self.path
        ids = f"{self.request_id} ({self.client_id})" if self.client_id else self.request_id
        first = f", first token after {self.ttft_s:.3f} s" if self.ttft_s is not None else ""
        return f"{ids} {what} {self.status} {self.outcome}{error} in {self.latency_s:.3f} s{first}{tokens}{missed}"


def first_token_s(choices: Sequence[Choice]) -> float | None:
    """Return when the first token of any sequence was generated, by the monotonic clock."""
    return min((choice.output.first_s for choice in choices if choice.output.first_s is not None), default=None)


def per_token_s(choices: Sequence[Choice]) -> tuple[float, ...]:
    """Return the seconds per token after the first, for each sequence with several tokens."""
    outputs = [choice.output for choice in choices if len(choice.output.tokens) > 1]
    return tuple((o.last_s - o.first_s) / (len(o.tokens) - 1) for o in outputs if o.first_s is not None)


def started_s(choices: Sequence[Choice]) -> float | None:
    """Return when the last sequence started, by the monotonic clock; None if one never had a token."""
    starts = [choice.output.start_s for choice in choices if choice.output.start_s is not None]
    return max(starts) if starts and len(starts) == len(choices) else None


def outcome_of(status: int | None, choices: Sequence[Choice]) -> Outcome:
    """Return the outcome of a request; `status` None: the client disconnected before the last byte was sent."""
    if status in (429, 503):
        return "rejected"
    if status is None or status == 499:
        return "cancelled"
    if status >= 400:
        return "failed" if status >= 500 else "invalid"
    return "answered" if choices and all(choice.finish_reason for choice in choices) else "failed"


def kind_of(promise: Promise | None, answered: bool) -> Kind:
    """Return the class of a request."""
    if promise is None:
        return "joined" if answered else "none"
    return "long" if promise.long else "usual"
