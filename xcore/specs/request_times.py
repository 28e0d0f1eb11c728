"""Times of finished requests: those of start, first token and finish of each one, and their summary.

The event simulator and the runner both report in this form, so that predictions and measurements are computed alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xcore.arrays import Array, Flags
from xcore.specs.bound import ALL_REQUESTS, LONGEST, OF_LONGEST, BoundMeaning
from xcore.specs.estimate import Estimate


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """One finished request. Lengths are in tokens, times in seconds since the run began."""

    index: int
    input_tokens: int
    output_tokens: int
    arrival_s: float
    start_s: float
    """Start of the encoding batch that holds it."""
    first_token_s: float
    finish_s: float
    cached_tokens: int = 0
    """Tokens of its prompt that were in the cache at its first admission."""
    preemptions: int = 0


def percentiles(values: Sequence[float] | Array) -> dict[str, float | None]:
    """Return the mean and percentiles by linear interpolation; None for no values."""
    v = np.asarray(values, dtype=np.float64)
    if not v.size:
        return dict.fromkeys(("mean", "p50", "p90", "p95", "p99"))
    p50, p90, p95, p99 = np.percentile(v, [50, 90, 95, 99])
    return {"mean": float(v.mean()), "p50": float(p50), "p90": float(p90), "p95": float(p95), "p99": float(p99)}


@dataclass(frozen=True, slots=True)
class RequestTimesColumns:
    """Finished requests as arrays [n], named as in `RequestTimes`."""

    output_tokens: Array
    arrival_s: Array
    start_s: Array
    first_token_s: Array
    finish_s: Array

    @staticmethod
    def of(served: Sequence[RequestTimes]) -> "RequestTimesColumns":
        """Return the columns of these requests."""
        rows = [(s.output_tokens, s.arrival_s, s.start_s, s.first_token_s, s.finish_s) for s in served]
        return RequestTimesColumns(*np.array(rows, dtype=np.float64).reshape(-1, 5).T)

    def latencies(self, since: str) -> dict[str, Array]:
        """Return `latency` and `ttft` [n] since `start` or `arrival`, and `tpot`, in seconds.

        `tpot` is [requests of more than one token].
        """
        origin, many = self.start_s if since == "start" else self.arrival_s, self.output_tokens > 1
        return {
            "latency": self.finish_s - origin,
            "ttft": self.first_token_s - origin,
            "tpot": (self.finish_s - self.first_token_s)[many] / (self.output_tokens[many] - 1),
        }


def latencies(served: Sequence[RequestTimes], since: str) -> dict[str, Array]:
    """Return `RequestTimesColumns.latencies` of these requests."""
    return RequestTimesColumns.of(served).latencies(since)


def long_outputs(output_tokens: Array) -> Flags:
    """Return for each request [n] whether a bound on the 99th-percentile length applies to it.

    These are outputs whose length lies between the 98th and the 100th percentile of all.
    """
    long: Flags = output_tokens >= np.percentile(output_tokens, 100 * (1 - LONGEST))
    return long


def bound_latency(columns: RequestTimesColumns, bound: BoundMeaning, since: str) -> float:
    """Return the bounded latency: a percentile over all requests or, for `p99-length`, over the longest outputs.

    For `p99-length` it is the 95th percentile over the requests whose output length lies between the 98th and the 100th
    percentile of all.
    """
    latency = columns.latencies(since)["latency"]
    if bound.of_length:
        return float(np.percentile(latency[long_outputs(columns.output_tokens)], 100 * OF_LONGEST))
    return float(np.percentile(latency, bound.percentile))


def summarise(
    served: Sequence[RequestTimes],
    seconds: float,
    bound: BoundMeaning = ALL_REQUESTS,
    memory_bytes: tuple[float, ...] = (),
    utilisation: tuple[float, ...] = (),
) -> Estimate:
    """Summarise a run as an estimate. Latencies count from arrival if requests arrive over time."""
    return summarise_columns(RequestTimesColumns.of(served), seconds, bound, memory_bytes, utilisation)


def most_together(started: Array, finished: Array) -> int:
    """Return the largest number of requests that run at a time, from when they start and finish [n]."""
    ended = np.searchsorted(np.sort(finished), np.sort(started), side="right")
    return int((np.arange(1, len(ended) + 1) - ended).max())


def summarise_columns(
    columns: RequestTimesColumns,
    seconds: float,
    bound: BoundMeaning = ALL_REQUESTS,
    memory_bytes: tuple[float, ...] = (),
    utilisation: tuple[float, ...] = (),
) -> Estimate:
    """Summarise requests as `summarise` does, from arrays."""
    since = "arrival" if (columns.arrival_s > 0).any() else "start"
    count, times = len(columns.finish_s), columns.latencies(since)
    latency, ttft, tpot = (percentiles(times[key]) for key in ("latency", "ttft", "tpot"))
    bounded = {key: float(np.percentile(v, bound.percentile)) if v.size else None for key, v in times.items()}
    return Estimate(
        throughput_seq_s=count / seconds if seconds else 0.0,
        throughput_tok_s=float(columns.output_tokens.sum()) / seconds if seconds else 0.0,
        latency_s=bound_latency(columns, bound, since) if count else None,
        latency_p50_s=latency["p50"],
        latency_p99_s=latency["p99"],
        ttft_s=ttft["mean"],
        tpot_s=tpot["mean"],
        ttft_p99_s=ttft["p99"],
        tpot_p99_s=tpot["p99"],
        latency_mean_s=latency["mean"],
        ttft_bounded_s=bounded["ttft"],
        tpot_bounded_s=bounded["tpot"],
        latency_from="start" if since == "start" else "arrival",
        memory_bytes=memory_bytes,
        utilisation=utilisation,
    )


def steady_tokens_s(served: Sequence[RequestTimes]) -> float | None:
    """Return the output tokens per second between the ramp-up and the drain; None if the run was too short.

    The ramp-up ends when all requests of the first batch have left; the drain begins when the last request starts. The
    tokens of a request count as evenly spaced between its first and its last.
    """
    if not served:
        return None
    first = min(s.start_s for s in served)
    begin = max(s.finish_s for s in served if s.start_s == first)
    end = max(s.start_s for s in served)
    if end <= begin:
        return None
    total = 0.0
    for s in served:
        total += begin <= s.first_token_s < end
        if s.output_tokens > 1:
            overlap = min(s.finish_s, end) - max(s.first_token_s, begin)
            total += max(0.0, overlap) / (s.finish_s - s.first_token_s) * (s.output_tokens - 1)
    return total / (end - begin) if total else None  # the gap between two batches is no steady state
