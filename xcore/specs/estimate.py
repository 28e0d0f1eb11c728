"""Estimate: predicted or measured throughput, latencies, memory and utilisation of a schedule."""

from dataclasses import dataclass
from typing import Literal

from xcore.spec import Spec

Binding = Literal["memory", "latency", "encoding", "decoding"]


@dataclass(frozen=True)
class Estimate(Spec):
    """Figures in seconds, sequences and output tokens per second, and bytes. None: unknown, or infinite."""

    throughput_seq_s: float
    throughput_tok_s: float
    latency_s: float | None
    """The latency that the bound is about."""
    latency_p50_s: float | None
    latency_p99_s: float | None
    ttft_s: float | None
    """Mean time to first token."""
    tpot_s: float | None
    """Mean over requests of (finish - first token) / (output tokens - 1), without requests of one token."""
    ttft_p99_s: float | None
    tpot_p99_s: float | None
    latency_from: Literal["start", "arrival"] = "start"
    """Whether latencies count from the start of the request's encoding batch, or from its arrival."""
    memory_bytes: tuple[float, ...] = ()
    """Peak bytes per rank."""
    usable_bytes: float | None = None
    """Bytes of one device that an engine may fill; None: unknown."""
    kv_blocks: int | None = None
    """KV blocks of one replica's cache, on each stage; None: unknown."""
    kv_tokens: int | None = None
    """Tokens that these blocks hold."""
    utilisation: tuple[float, ...] = ()
    """Busy fraction per rank."""
    binding: Binding | None = None
    """What limits the throughput."""
    feasible: bool = True
    violations: tuple[str, ...] = ()
    preemptions_per_request: float | None = None
    """Preemptions for lack of memory; None: not counted."""
    latency_mean_s: float | None = None
    ttft_bounded_s: float | None = None
    """Time to first token at the percentile of its bound."""
    tpot_bounded_s: float | None = None
    """Time per output token at the percentile of its bound."""
    residents: float | None = None
    """Sequences between the start of their prefill and their last token, averaged over time; None: not counted."""
    engine: str | None = None
    """The engine preset whose time and memory are included; None: measured."""
    extrapolated: tuple[str, ...] = ()
    """Tables of the profile that were queried outside their grid."""
