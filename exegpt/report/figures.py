"""Figures with their units as rows of small tables: estimates of schedules, and percentiles of times."""

from collections.abc import Mapping

from xcore.duration import duration_text
from xcore.quantity import figure_text
from xcore.specs.estimate import Estimate
from xcore.specs.schedule import Schedule

ESTIMATE_COLUMNS = ("steady state", "")
PERCENTILES = ("mean", "p50", "p90", "p95", "p99")
"""The columns of `percentile_rows` after the first."""
TIMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "latency": "latency",
    "run": "completion of a run",
    "session": "completion of a session",
}
"""Times by their keys in JSON."""


def estimate_rows(estimate: Estimate, schedule: Schedule) -> list[tuple[str, str]]:
    """Return (name, text) of every figure of an estimate of `schedule`."""
    e = estimate
    requests_s, tokens_s = figure_text(e.throughput_seq_s), figure_text(e.throughput_tok_s)
    rows = {
        "throughput": f"{requests_s} requests/s, {tokens_s} output tokens/s",
        "bounded latency": _bounded(e, schedule),
        "latency, all requests": f"{_pair(('p50', e.latency_p50_s), ('p99', e.latency_p99_s))}, since {e.latency_from}",
        TIMES["ttft"]: _pair(("mean", e.ttft_s), ("p99", e.ttft_p99_s)),
        TIMES["tpot"]: _pair(("mean", e.tpot_s), ("p99", e.tpot_p99_s)),
        "memory": _memory(e, schedule),
        "KV cache": cache_text(schedule),
        "preemptions": f"{figure_text(e.preemptions_per_request)} per request" if schedule.admission == "grow" else "",
        "devices busy": _span([f"{share:.0%}" for share in sorted(e.utilisation)]),
        # The phase that takes the time; `memory` and `latency` come only from a search, which evaluates neighbours.
        "limited by" if e.binding in ("memory", "latency") else "bottleneck": e.binding or "",
        "not feasible": "; ".join(e.violations),
        "beyond the profile's grid": ", ".join(e.extrapolated),
    }
    return [(name, text) for name, text in rows.items() if text]


def steady_notes(schedule: Schedule) -> tuple[str, ...]:
    """Return a note if the schedule's requests arrive over time, which the steady state ignores."""
    if not schedule.workload.arrival_rate:
        return ()
    rate = figure_text(schedule.workload.arrival_rate, 4)
    return (
        f"the steady state ignores the arrivals ({rate}/s): requests are always waiting; --replay simulates arrivals",
    )


def percentile_rows(times: Mapping[str, Mapping[str, float | None]]) -> list[list[str]]:
    """Return a row for each of `times` (key of TIMES → mean and percentiles in seconds)."""
    return [[TIMES[key], *(_time(spread[name]) for name in PERCENTILES)] for key, spread in times.items()]


def _bounded(estimate: Estimate, schedule: Schedule) -> str:
    return f"{_time(estimate.latency_s)} for {schedule.meaning.latency_text}"


def _memory(estimate: Estimate, schedule: Schedule) -> str:
    if not estimate.memory_bytes or not estimate.usable_bytes:
        return ""
    used = _span([f"{amount / 2**30:.1f}" for amount in sorted(estimate.memory_bytes) if amount])
    return f"{used} GiB at the peak, of {estimate.usable_bytes / 2**30:.1f} usable GiB per device"


def cache_text(schedule: Schedule) -> str:
    """Return the capacity of one replica's cache, as text."""
    blocks, size = schedule.kv_blocks, schedule.block_size
    each = "" if schedule.replicas == 1 else ", each replica"
    return f"{blocks * size:,} tokens, {blocks:,} blocks of {size}{each}"


def _span(texts: list[str]) -> str:
    """Return the lowest and the highest value, or one if they are equal."""
    return "–".join(dict.fromkeys([texts[0], texts[-1]])) if texts else ""


def _pair(*figures: tuple[str, float | None]) -> str:
    return ", ".join(f"{name} {_time(value)}" for name, value in figures)


def _time(value: float | None) -> str:
    return "–" if value is None else duration_text(value)
