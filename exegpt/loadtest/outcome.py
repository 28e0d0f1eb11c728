"""Outcome: what one request got."""

from dataclasses import dataclass
from typing import Any

from xcore.specs.served import Served

REJECTED = "rejected"
"""The kind of a 429: the endpoint is well, and has too much to do."""
NO_DONE = "no_done"
"""The kind of a stream that ended without [DONE], where others of the endpoint end with it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request's end. Times in seconds since the run began."""

    index: int
    prompt_tokens: int
    """As the endpoint counted them, else as they were drawn."""
    asked_tokens: int
    """Output tokens that were drawn for it."""
    output_tokens: int
    scheduled_s: float
    """When it arrives. Latencies count from here."""
    due_s: float
    """When it may be sent: later than scheduled where --max-concurrency holds it back."""
    sent_s: float
    """When its last attempt was taken up; the first one's time less `due_s` is the client's own lag."""
    lag_s: float
    first_token_s: float | None
    finish_s: float
    """When its last event came, or the failure."""
    status: int | None
    """Of HTTP; None without an answer."""
    finish_reason: str | None
    error: str | None
    """None, REJECTED, `http_` with a status, connect, closed, timeout, not_http, not_streamed, broken_json, in_stream,
    empty, unfinished, `finish_` with another finish reason than a complete answer's, NO_DONE or retry_after.
    """
    message: str | None
    retries: int
    chunks: int
    """Chunks that brought a token."""
    done: bool | None
    """Whether [DONE] came; None: the client left before."""
    last_token_s: float | None = None
    """When its last token or finish reason came; the usage and [DONE] may come later."""

    @property
    def ok(self) -> bool:
        """Whether it has its whole answer."""
        return self.error is None

    @property
    def latency_s(self) -> float:
        """From its arrival to its last event."""
        return self.finish_s - self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        """From its arrival to its first token."""
        return None if self.first_token_s is None else self.first_token_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """Per output token after the first; None for less than two tokens or chunks."""
        if self.first_token_s is None or min(self.output_tokens, self.chunks) < 2:
            return None
        last_s = self.finish_s if self.last_token_s is None else self.last_token_s
        return (last_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def in_one_chunk(self) -> bool:
        """Whether it has its whole answer, of several tokens, in one chunk: then its TPOT is not measurable."""
        return self.ok and self.output_tokens > 1 and self.chunks < 2

    @property
    def served(self) -> Served:
        """Its times in the form that runs and replays have; only of one with its whole answer."""
        assert self.first_token_s is not None
        return Served(
            self.index,
            self.prompt_tokens,
            self.output_tokens,
            self.scheduled_s,
            self.sent_s,
            self.first_token_s,
            self.finish_s,
        )

    def document(self, rate: float | None) -> dict[str, Any]:
        """A line of the results; `rate` is None for infinity or a trace's own."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        times = {"latency_s": self.latency_s, "ttft_s": self.ttft_s, "tpot_s": self.tpot_s}
        return {"rate_seq_s": rate, "ok": self.ok, **fields, **(times if self.ok else dict.fromkeys(times))}
