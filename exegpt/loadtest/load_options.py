"""The options of `exegpt bench serve`."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LoadOptions:
    """The options as the user typed them; durations, rates and workloads as text."""

    url: str
    model: str | None
    """The model's name; None: the endpoint's first model."""
    api: str
    """completions or chat"""
    prompts: str | None
    """ids or text; None: the format that the API takes."""
    rate: str | None
    """Rates separated by commas, one of which may be `inf`; None: the trace's own arrivals."""
    arrivals: str
    """poisson, burst or trace"""
    burstiness: float | None
    """The shape of the Gamma distribution of gaps between arrivals."""
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
    """Prompts' ids are below this; None: the tokenizer's size, otherwise VOCAB."""
    retry: int
    timeout: str
    warm_up: int
    seed: int
    out: Path | None
    report: Path | None
