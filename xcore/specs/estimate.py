"""Estimate: predicted or measured throughput, latencies, memory and utilisation of a schedule."""

from dataclasses import dataclass
from typing import Literal

from xcore.noun import Noun

Binding = Literal["memory", "latency", "encoding", "decoding"]


@dataclass(frozen=True)
class Estimate(Noun):
    """Seconds, sequences and output tokens per second, bytes. None: not known, or infinite."""

    throughput_seq_s: float
    throughput_tok_s: float
    latency_s: float | None
    """The latency that the bound is about."""
    latency_p50_s: float | None
    latency_p99_s: float | None
    ttft_s: float | None
    """Mean time to first token."""
    tpot_s: float | None
    """Mean over requests of (finish - first token) / (output tokens - 1), those of one token left out."""
    ttft_p99_s: float | None
    tpot_p99_s: float | None
    latency_from: Literal["start", "arrival"] = "start"
    """Latencies count from the start of the request's encoding batch, or from its arrival."""
    memory_bytes: tuple[float, ...] = ()
    """Peak per rank."""
    usable_bytes: float | None = None
    """What an engine may fill of one device; None: not known."""
    kv_blocks: int | None = None
    """Of one replica's cache, on each stage; None: not known."""
    kv_tokens: int | None = None
    """What these hold."""
    utilisation: tuple[float, ...] = ()
    """Busy fraction per rank."""
    binding: Binding | None = None
    """What limits the throughput."""
    feasible: bool = True
    violations: tuple[str, ...] = ()
    preemptions_per_request: float | None = None
    """For lack of memory; None: not counted."""
    latency_mean_s: float | None = None
    ttft_bounded_s: float | None = None
    """At the percentile that a bound on it is about."""
    tpot_bounded_s: float | None = None
    """The same."""
    residents: float | None = None
    """Sequences between the start of their prefill and their last token, averaged over time; None: not counted."""
    engine: str | None = None
    """The preset whose time and memory are in it; None: measured."""
    extrapolated: tuple[str, ...] = ()
    """Tables of the profile that were queried outside their grid."""
