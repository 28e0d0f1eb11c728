"""The result of one request."""

from dataclasses import dataclass

from xcore.specs.request_times import RequestTimes

REJECTED = "rejected"
"""Error kind of HTTP 429 (overloaded, not failed)."""
NO_DONE = "no_done"
"""Error kind of a stream that ended without [DONE], if other streams of the endpoint end with it."""


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """The result of one request; times are in seconds since the run began."""

    index: int
    prompt_tokens: int
    """The number that the endpoint counted, otherwise the drawn number."""
    asked_tokens: int
    """The drawn number of output tokens."""
    output_tokens: int
    scheduled_s: float
    """When it arrives; latencies count from here."""
    due_s: float
    """When it may be sent: later than `scheduled_s` if --max-concurrency holds it back."""
    sent_s: float
    """When its last attempt began; the client's own lag, `lag_s`, is the begin of the first attempt less `due_s`."""
    lag_s: float
    first_token_s: float | None
    finish_s: float
    """When its last event came, or when it failed."""
    status: int | None
    """The HTTP status; None without an answer."""
    finish_reason: str | None
    error: str | None
    """None, or the kind of the error.

    Without an answer: connect, closed, timeout, not_http, or retry_after. By HTTP status: REJECTED, or `http_` with the
    status. For an incomplete answer: not_streamed, broken_json, in_stream, empty, unfinished, NO_DONE, or `finish_`
    with its finish reason.
    """
    message: str | None
    retries: int
    chunks: int
    """Number of chunks with a token."""
    done: bool | None
    """Whether [DONE] came; None: the client disconnected before."""
    last_token_s: float | None = None
    """When its last token or finish reason came; the usage and [DONE] may come later."""

    @property
    def ok(self) -> bool:
        """Whether the request has a complete answer."""
        return self.error is None

    @property
    def latency_s(self) -> float:
        """Seconds from the request's arrival to its last event."""
        return self.finish_s - self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the request's arrival to its first token."""
        return None if self.first_token_s is None else self.first_token_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None for less than two tokens or chunks."""
        if self.first_token_s is None or min(self.output_tokens, self.chunks) < 2:
            return None
        last_s = self.finish_s if self.last_token_s is None else self.last_token_s
        return (last_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def in_one_chunk(self) -> bool:
        """Whether a complete answer of several tokens came in one chunk, so that its TPOT can't be measured."""
        return self.ok and self.output_tokens > 1 and self.chunks < 2

    @property
    def served(self) -> RequestTimes:
        """The request's times in the format of runs and replays; only for a complete answer."""
        assert self.first_token_s is not None
        return RequestTimes(
            self.index,
            self.prompt_tokens,
            self.output_tokens,
            self.scheduled_s,
            self.sent_s,
            self.first_token_s,
            self.finish_s,
        )

    def document(self, rate: float | None) -> dict[str, object]:
        """Return a line of the results; `rate` is None for an infinite rate or a trace's arrivals."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        times = {"latency_s": self.latency_s, "ttft_s": self.ttft_s, "tpot_s": self.tpot_s}
        return {"rate_seq_s": rate, "ok": self.ok, **fields, **(times if self.ok else dict.fromkeys(times))}
