"""What `exegpt bench serve` is asked for."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LoadOptions:
    """The options as they were typed; durations, rates and workloads as text."""

    url: str
    model: str | None
    """None: the endpoint's first."""
    api: str
    """completions or chat"""
    prompts: str | None
    """ids or text; None: what the API takes."""
    rate: str | None
    """Rates separated by commas, of which one may be `inf`; None: the trace's own arrivals."""
    arrivals: str
    """poisson, burst or trace"""
    burstiness: float | None
    """The shape of the gaps' Gamma distribution."""
    workload: str | None
    columns: str | None
    scale_to_context: bool
    num: int | None
    duration: str | None
    latency_bound: str | None
    ttft: str | None
    tpot: str | None
    max_concurrency: int | None
    ignore_eos: bool
    max_tokens_factor: float
    temperature: float
    tokenizer: Path | None
    vocab: int | None
    """Prompts' ids are below this; None: the tokenizer's size, else VOCAB."""
    retry: int
    timeout: str
    warm_up: int
    seed: int
    out: Path | None
    report: Path | None
