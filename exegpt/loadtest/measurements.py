"""Measurements of a run under load: counts, rates, percentiles, and whether the client itself was fast enough."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from exegpt.loadtest.open_loop import Sent
from exegpt.loadtest.request_outcome import REJECTED, RequestOutcome
from xcore.duration import duration_text
from xcore.quantity import percent_text
from xcore.specs.request_times import latencies, percentiles

MOST_LAG_S = 0.010
"""Send lag at the 99th percentile above which a run is invalid, because requests were sent later than they arrived."""
MOST_CPU_SHARE = 0.05
"""Share of all cores' time above which the client slows down a server on the same machine."""

Spread = dict[str, float | None]
"""mean, p50, p90, p95 and p99, in seconds."""


@dataclass(frozen=True)
class RequestBounds:
    """Bounds in seconds that a request must meet to count for goodput; None: no bound."""

    latency_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def any(self) -> bool:
        """Whether there is a bound."""
        return (self.latency_s, self.ttft_s, self.tpot_s) != (None, None, None)

    def met_by(self, outcome: RequestOutcome) -> bool:
        """Return whether a complete answer meets all bounds that can be measured for it."""
        times = (outcome.latency_s, outcome.ttft_s, outcome.tpot_s)
        bounds = (self.latency_s, self.ttft_s, self.tpot_s)
        kept = (bound is None or time is None or time <= bound for bound, time in zip(bounds, times, strict=True))
        return outcome.ok and all(kept) and (self.tpot_s is None or not outcome.in_one_chunk)


@dataclass(frozen=True)
class Client:
    """The resources that the client used."""

    cpu_share: float
    """Share of all cores' time."""
    cores: int
    connections: int
    send_lag: Spread
    """How late requests were sent; waiting for --max-concurrency doesn't count."""


@dataclass(frozen=True)
class RunMeasurements:
    """The measurements of one run at one rate."""

    rate_seq_s: float | None
    """Requests per second; None: infinite, or a trace's own."""
    offered_seq_s: float | None
    """The rate of the drawn arrivals, which differs from `rate_seq_s` by chance; None: all at once."""
    requests: int
    completed: int
    rejected: int
    """Number of 429s, after all retries."""
    failed: int
    errors: dict[str, int]
    """Failed requests by kind."""
    messages: dict[str, str]
    """The first message of each kind, including rejections."""
    statuses: dict[str, int]
    """Answers by HTTP status."""
    finish_reasons: dict[str, int]
    without_done: int
    """Answers that count although they ended without [DONE], as all answers of this endpoint do."""
    in_one_chunk: int
    """Answers of several tokens in one chunk: they have no TPOT, and don't count as within a bound on it."""
    other_lengths: int
    """Completed requests whose output length differs from the drawn one."""
    retries: int
    seconds: float
    """Seconds from the first arrival to the last end."""
    throughput_seq_s: float
    """Completed requests per second."""
    throughput_tok_s: float
    """Output tokens of completed requests per second."""
    input_tok_s: float
    goodput_seq_s: float | None
    """Completed requests within all bounds per second; None without a bound, or if no request can be judged."""
    within_bounds: float | None
    """The share of all requests within all bounds; rejected and failed requests count as outside."""
    latency: Spread
    ttft: Spread
    tpot: Spread
    since_sent: dict[str, Spread]
    """`latency` and `ttft` counted from sending the request (its last attempt) instead of its arrival."""
    client: Client
    warnings: tuple[str, ...]
    """Why the run is invalid; empty if it is valid."""

    @property
    def valid(self) -> bool:
        """Whether the client kept its schedule and left the cores to the server."""
        return not self.warnings

    def document(self) -> dict[str, object]:
        """Return the run as --json prints it."""
        return {**asdict(self), "valid": self.valid}


def measure(sent: Sent, rate: float | None, bounds: RequestBounds) -> RunMeasurements:
    """Return the figures of a run at `rate`, in requests per second; None for a trace's own arrivals."""
    outcomes = sent.outcomes
    whole = [outcome for outcome in outcomes if outcome.ok]
    failed = Counter(o.error for o in outcomes if o.error not in (None, REJECTED))
    last = max((outcome.scheduled_s for outcome in outcomes), default=0.0)
    seconds = max((outcome.finish_s for outcome in outcomes), default=0.0)
    served = [outcome.served for outcome in whole]
    times, since_sent = latencies(served, "arrival"), latencies(served, "start")
    tpots = [outcome.tpot_s for outcome in whole if outcome.tpot_s is not None]
    within, in_one_chunk = sum(map(bounds.met_by, outcomes)), sum(outcome.in_one_chunk for outcome in whole)
    judged = bounds.any and (bounds.tpot_s is None or bool(tpots) or not in_one_chunk)
    client = Client(sent.cpu_share, sent.cores, sent.connections, percentiles([o.lag_s for o in outcomes]))

    def per_second(amount: float) -> float:
        return amount / seconds if seconds else 0.0

    return RunMeasurements(
        rate_seq_s=rate if rate is not None and math.isfinite(rate) else None,
        offered_seq_s=(len(outcomes) - 1) / last if last > 0 else None,
        requests=len(outcomes),
        completed=len(whole),
        rejected=sum(outcome.error == REJECTED for outcome in outcomes),
        failed=failed.total(),
        errors={str(kind): count for kind, count in failed.most_common()},
        messages=_messages(outcomes),
        statuses=_counted(str(o.status) for o in outcomes if o.status is not None),
        finish_reasons=_counted(o.finish_reason for o in whole if o.finish_reason is not None),
        without_done=sum(outcome.done is False for outcome in whole),
        in_one_chunk=in_one_chunk,
        other_lengths=sum(outcome.output_tokens != outcome.asked_tokens for outcome in whole),
        retries=sum(outcome.retries for outcome in outcomes),
        seconds=seconds,
        throughput_seq_s=per_second(len(whole)),
        throughput_tok_s=per_second(sum(outcome.output_tokens for outcome in whole)),
        input_tok_s=per_second(sum(outcome.prompt_tokens for outcome in whole)),
        goodput_seq_s=per_second(within) if judged else None,
        within_bounds=within / len(outcomes) if judged and outcomes else None,
        latency=percentiles(times["latency"]),
        ttft=percentiles(times["ttft"]),
        tpot=percentiles(tpots),
        since_sent={key: percentiles(since_sent[key]) for key in ("latency", "ttft")},
        client=client,
        warnings=_warnings(client, rate is not None and math.isinf(rate)),
    )


def _counted(values: Iterable[str]) -> dict[str, int]:
    return dict(Counter(values).most_common())


def _messages(outcomes: Sequence[RequestOutcome]) -> dict[str, str]:
    messages: dict[str, str] = {}
    for outcome in outcomes:
        if outcome.error is not None and outcome.message:
            messages.setdefault(outcome.error, outcome.message)
    return messages


def _warnings(client: Client, at_once: bool) -> tuple[str, ...]:
    """Return why the figures describe the client rather than the server.

    Requests that are sent all at once have no arrival times, so they can't be late.
    """
    lag, texts = client.send_lag["p99"], []
    if lag is not None and lag > MOST_LAG_S and not at_once:
        texts.append(
            f"1% of the requests were sent at least {duration_text(lag)} late (allowed: {duration_text(MOST_LAG_S)}): "
            "the client was too slow or had no CPU time"
        )
    if client.cpu_share > MOST_CPU_SHARE:
        texts.append(
            f"the client used {percent_text(client.cpu_share)} of the CPU time of {client.cores} cores (allowed: "
            f"{percent_text(MOST_CPU_SHARE)}): it slows down a server on the same machine"
        )
    return tuple(texts)
