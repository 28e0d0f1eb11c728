"""`exegpt bench serve`: open-loop load on an OpenAI-compatible endpoint."""

from pathlib import Path
from typing import Annotated

import typer

from exegpt.cli import options

_PER_REQUEST = "counts requests within it (goodput)"


def serve(
    url: Annotated[str, typer.Option("--url", "-u", help="Like http://localhost:8000, with or without /v1.")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="A served model's name. Default: the endpoint's first.")
    ] = None,
    api: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    prompts: Annotated[str | None, typer.Option(help="ids or text. Default: token ids, texts for chat.")] = None,
    rate: Annotated[
        str | None,
        typer.Option("--rate", help="Requests per second: 5/s, several in turn (1/s,2/s,4/s), or inf: all at once."),
    ] = None,
    arrivals: Annotated[
        str, typer.Option(help="poisson, burst (gaps of a Gamma distribution), or trace (its own).")
    ] = "poisson",
    burstiness: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="burst: the distribution's shape; 1 is poisson, lower is burstier. Default: 0.25."
        ),
    ] = None,
    workload: options.WORKLOAD = None,
    columns: options.COLUMNS = None,
    num: Annotated[
        int | None, typer.Option("--num", "-n", min=1, help="Requests per rate. Default: 100, or the trace's.")
    ] = None,
    duration: Annotated[str | None, typer.Option(help="Instead: the requests that arrive in this time.")] = None,
    latency_bound: Annotated[
        str | None, typer.Option("--latency-bound", "-l", help=f"{options.LATENCY_BOUND_HELP} It {_PER_REQUEST}.")
    ] = None,
    ttft: Annotated[str | None, typer.Option(help="A bound on the time to first token; the same.")] = None,
    tpot: Annotated[str | None, typer.Option(help="A bound on the time per output token; the same.")] = None,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="At most so many unanswered requests; others wait in this client.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option(help="Outputs have the drawn lengths, by a key that vLLM, SGLang and exegpt know.")
    ] = True,
    max_tokens_factor: Annotated[
        float, typer.Option(help="max_tokens is so many times the drawn length, at which the client then leaves.")
    ] = 1.0,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A directory with the model's tokenizer.json, for texts of exact lengths.")
    ] = None,
    vocab: Annotated[
        int | None, typer.Option(min=1, help="Token ids are below this. Default: the tokenizer's, else 256.")
    ] = None,
    retry: Annotated[int, typer.Option(min=0, help="How often to wait for a 429's or 503's Retry-After.")] = 0,
    timeout: Annotated[str, typer.Option(help="For one answer; inf: none.")] = "10m",
    warm_up: Annotated[int, typer.Option(min=0, help="Requests before, which aren't measured.")] = 0,
    seed: options.SEED = 0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write a JSON line per request to this file.")] = None,
    plot: Annotated[bool, typer.Option("--plot", help="Draw throughput over latency in the terminal.")] = False,
    report: options.REPORT = None,
    json: options.JSON = False,
) -> None:
    """Load an OpenAI-compatible endpoint (this server, vLLM, SGLang, transformers) with requests that arrive whether or
    not earlier ones have been answered, and measure what each of them gets. The API key is taken from OPENAI_API_KEY.

    Example: exegpt bench serve --url http://localhost:8000 --rate 1/s,2/s,4/s --workload 128/64 --latency-bound 5s
    """
    from exegpt.app.load.bench_serve import plan, run
    from exegpt.app.load.options import LoadOptions
    from exegpt.report import output

    load = plan(options.build(LoadOptions, locals()))
    runs = run(load, output.note)
    from exegpt.app.load import report as shown

    if report:
        shown.write_report(report, load, runs)
    warnings = [text for text in shown.sentences(load, runs) if "INVALID" in text]
    if json:
        output.notes(warnings)
        return output.emit(
            {
                "endpoint": {"url": url, "model": load.endpoint.model, "api": api, "context": load.endpoint.context},
                "load": shown.described(load),
                "runs": [measured.document() for measured in runs],
                "assumptions": list(load.notes),
                "provenance": output.provenance(seed=seed),
            }
        )
    output.notes([f"{load.endpoint.model} at {url}; {shown.described(load)}", *load.notes])
    output.table(shown.RUN_COLUMNS, shown.run_rows(load, runs))
    if len(runs) == 1:
        output.table(shown.TIME_COLUMNS, shown.time_rows(runs[0]))
    if plot:
        from exegpt.report import terminal

        print(terminal.plot(shown.series(load, runs), load.bounds.latency_s))
    output.notes(shown.sentences(load, runs))
