"""The options of `exegpt bench serve`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from exegpt.options import groups


@dataclass(frozen=True, kw_only=True)
class LoadOptions(groups.TraceOptions, groups.JsonOption):
    """The endpoint, its load and its bounds; durations, rates and workloads are texts."""

    url: Annotated[str, typer.Option("--url", "-u", help="Like http://localhost:8000, with or without /v1.")]
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="A served model's name. Default: the endpoint's first model.")
    ] = None
    api: Annotated[str, typer.Option(help="completions or chat.")] = "completions"
    prompts: Annotated[str | None, typer.Option(help="ids or text. Default: ids for completions, text for chat.")] = (
        None
    )
    rate: Annotated[
        str | None,
        typer.Option(
            "--rate",
            help="Requests per second: 5/s; several rates, one after the other (1/s,2/s,4/s); or inf, which sends all "
            "requests at once.",
        ),
    ] = None
    arrivals: Annotated[
        str, typer.Option(help="poisson, burst (Gamma-distributed gaps), or trace (the trace's own times).")
    ] = "poisson"
    burstiness: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="The shape of the Gamma distribution for --arrivals burst. A shape of 1 is poisson; a lower shape is "
            "burstier. Default: 0.25.",
        ),
    ] = None
    workload: groups.WORKLOAD = None
    num: Annotated[
        int | None, typer.Option("--num", "-n", min=1, help="Requests per rate. Default: 100, or all of the trace's.")
    ] = None
    duration: Annotated[
        str | None, typer.Option(help="Instead of --num: send all requests that arrive within this time.")
    ] = None
    latency_bound: Annotated[
        str | None,
        typer.Option(
            "--latency-bound",
            "-l",
            help=groups.LATENCY_BOUND_HELP + " Goodput counts the requests that keep it.",
        ),
    ] = None
    ttft: Annotated[str | None, typer.Option(help="A bound on the time to first token, also for goodput.")] = None
    tpot: Annotated[str | None, typer.Option(help="A bound on the time per output token, also for goodput.")] = None
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of unanswered requests; others wait in this client.")
    ] = None
    ignore_eos: Annotated[
        bool,
        typer.Option(
            help="Force outputs to the drawn lengths with `ignore_eos`, which vLLM, SGLang and exegpt support."
        ),
    ] = True
    max_tokens_factor: Annotated[
        float,
        typer.Option(help="Send max_tokens as this multiple of the drawn length, and disconnect at the drawn length."),
    ] = 1.0
    temperature: Annotated[float, typer.Option(min=0.0, help="The temperature of sampling; 0 is greedy.")] = 0.0
    tokenizer: Annotated[
        Path | None, typer.Option(help="A directory with the model's tokenizer.json, for texts of exact lengths.")
    ] = None
    vocab: Annotated[
        int | None, typer.Option(min=1, help="Token ids are below this. Default: the tokenizer's size, else 256.")
    ] = None
    retry: Annotated[
        int, typer.Option(min=0, help="Maximum number of retries after a 429 or 503, each after its Retry-After.")
    ] = 0
    timeout: Annotated[str, typer.Option(help="Time limit of one answer; inf: no limit.")] = "10m"
    warm_up: Annotated[int, typer.Option(min=0, help="Number of requests to send first without measuring them.")] = 0
    seed: groups.SEED = 0
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write a JSON line per request to this file.")] = None
    plot: Annotated[bool, typer.Option("--plot", help="Draw throughput over latency in the terminal.")] = False
    report: groups.REPORT = None
