"""Served requests: when each one started, gave its first token and finished; what their latencies come to.

The event simulator and the runner both report in this form, so that predicted and measured are the same arithmetic.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from exegpt.estimate import Estimate
from exegpt.schedule import Bound


@dataclass(frozen=True, slots=True)
class Served:
    """One finished request. Tokens; seconds since the run began."""

    index: int
    input_tokens: int
    output_tokens: int
    arrival_s: float
    start_s: float
    """When the encoding batch that holds it began."""
    first_token_s: float
    finish_s: float


def percentiles(values: Sequence[float] | np.ndarray) -> dict[str, float | None]:
    """Mean and percentiles by linear interpolation; None for no values."""
    v = np.asarray(values, dtype=np.float64)
    if not v.size:
        return dict.fromkeys(("mean", "p50", "p90", "p95", "p99"))
    p50, p90, p95, p99 = np.percentile(v, [50, 90, 95, 99])
    return {"mean": float(v.mean()), "p50": float(p50), "p90": float(p90), "p95": float(p95), "p99": float(p99)}


def latencies(served: Sequence[Served], since: str) -> dict[str, np.ndarray]:
    """`latency` and `ttft` [n] since `start` or `arrival`, `tpot` [requests of more than one token], in seconds."""
    columns = np.array(
        [
            (s.start_s if since == "start" else s.arrival_s, s.first_token_s, s.finish_s, s.output_tokens)
            for s in served
        ],
        dtype=np.float64,
    ).reshape(-1, 4)
    origin, first, finish, tokens = columns.T
    many = tokens > 1
    return {
        "latency": finish - origin,
        "ttft": first - origin,
        "tpot": (finish - first)[many] / (tokens[many] - 1),
    }


def bound_latency(served: Sequence[Served], bound: Bound, since: str) -> float | None:
    """The latency that the bound is about.

    `p99-length`: the 95th percentile over the requests whose output length lies between the 98th and the 100th
    percentile of all. `p99-queries`: the 99th percentile over all requests.
    """
    if not served:
        return None
    latency = latencies(served, since)["latency"]
    if bound == "p99-queries":
        return float(np.percentile(latency, 99))
    output = np.array([s.output_tokens for s in served])
    return float(np.percentile(latency[output >= np.percentile(output, 98)], 95))


def summarise(
    served: Sequence[Served],
    seconds: float,
    bound: Bound,
    memory_bytes: tuple[float, ...] = (),
    utilisation: tuple[float, ...] = (),
) -> Estimate:
    """The run's figures in an estimate's form. Latencies count from arrival where requests arrive over time."""
    since = "arrival" if any(s.arrival_s > 0 for s in served) else "start"
    times = latencies(served, since)
    latency, ttft, tpot = (percentiles(times[key]) for key in ("latency", "ttft", "tpot"))
    return Estimate(
        throughput_seq_s=len(served) / seconds if seconds else 0.0,
        throughput_tok_s=sum(s.output_tokens for s in served) / seconds if seconds else 0.0,
        latency_s=bound_latency(served, bound, since),
        latency_p50_s=latency["p50"],
        latency_p99_s=latency["p99"],
        ttft_s=ttft["mean"],
        tpot_s=tpot["mean"],
        ttft_p99_s=ttft["p99"],
        tpot_p99_s=tpot["p99"],
        latency_from="start" if since == "start" else "arrival",
        memory_bytes=memory_bytes,
        utilisation=utilisation,
    )


def steady_tokens_s(served: Sequence[Served]) -> float | None:
    """Output tokens per second between the ramp-up and the drain; None where the run was too short to have a between.

    The ramp-up ends when all requests of the first batch have left; the drain begins when the last request starts.
    Within a request, tokens are taken as evenly spaced between its first and its last.
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
    return total / (end - begin) if total else None  # a moment between two batches is no steady state
