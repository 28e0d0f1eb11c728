"""The options of `exegpt bench serve`."""

from dataclasses import dataclass
from pathlib import Path

from exegpt.options import shared_options
from exegpt.options.option_record import option, required


@dataclass(frozen=True, kw_only=True)
class LoadOptions(shared_options.TraceOptions, shared_options.JsonOption):
    """The endpoint, its load and its bounds; durations, rates and workloads are texts."""

    url: str = required("The endpoint's URL, like http://localhost:8000, with or without /v1.", "-u")
    model: str | None = option(None, "A served model's name. Default: the endpoint's first model.", "-m")
    api: str = option("completions", "The API: completions or chat.")
    prompts: str | None = option(None, "The prompts' format: ids or text. Default: ids for completions, text for chat.")
    rate: str | None = option(
        None,
        "Requests per second: 5/s; several rates, one after the other (1/s,2/s,4/s); or inf, which sends all "
        "requests at once.",
    )
    arrivals: str = option(
        "poisson", "Arrivals: poisson, burst (Gamma-distributed gaps), or trace (the trace's own times)."
    )
    burstiness: float | None = option(
        None,
        "The shape of the Gamma distribution for --arrivals burst. A shape of 1 is poisson; a lower shape is "
        "burstier. Default: 0.25.",
        min=0.001,
    )
    workload: str | None = shared_options.WORKLOAD
    num: int | None = option(None, "Requests per rate. Default: 100, or all of the trace's.", "-n", min=1)
    duration: str | None = option(None, "Instead of --num: send all requests that arrive within this time.")
    latency_bound: str | None = option(
        None, shared_options.LATENCY_BOUND_HELP + " Goodput counts the requests that meet it.", "-l"
    )
    ttft: str | None = option(None, "A bound on the time to first token, also for goodput.")
    tpot: str | None = option(None, "A bound on the time per output token, also for goodput.")
    max_concurrency: int | None = option(
        None, "Maximum number of unanswered requests; others wait in this client.", min=1
    )
    ignore_eos: bool = option(
        True,
        "Force outputs to the drawn lengths with `ignore_eos`, which vLLM, SGLang and exegpt support.",
        "--ignore-eos/--no-ignore-eos",
    )
    max_tokens_factor: float = option(
        1.0, "Send max_tokens as this multiple of the drawn length, and disconnect at the drawn length."
    )
    temperature: float = option(0.0, "The temperature of sampling; 0 is greedy.", min=0.0)
    tokenizer: Path | None = option(None, "A directory with the model's tokenizer.json, for texts of exact lengths.")
    vocab: int | None = option(None, "Token ids are below this. Default: the tokenizer's size, else 256.", min=1)
    retry: int = option(0, "Maximum number of retries after a 429 or 503, each after its Retry-After.", min=0)
    timeout: str = option("10m", "Time limit of one answer; inf: no limit.")
    warm_up: int = option(0, "Number of requests to send first without measuring them.", min=0)
    seed: int = shared_options.SEED
    out: Path | None = option(None, "Write a JSON line per request to this file.", "-o")
    plot: bool = option(False, "Draw throughput over latency in the terminal.")
    report: Path | None = shared_options.REPORT
