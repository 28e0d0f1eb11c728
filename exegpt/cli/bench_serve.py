"""`exegpt bench serve`: an open-loop load test of an OpenAI-compatible endpoint."""

from pathlib import Path
from typing import Annotated

import typer

from exegpt.cli import options

_PER_REQUEST = "counts requests within it (goodput)"


def serve(
    url: Annotated[str, typer.Option("--url", "-u", help="Like http://localhost:8000, with or without /v1.")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="A served model's name. Default: the endpoint's first model.")
    ] = None,
    api: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    prompts: Annotated[str | None, typer.Option(help="ids or text. Default: token ids, texts for chat.")] = None,
    rate: Annotated[
        str | None,
        typer.Option("--rate", help="Requests per second: 5/s, several in turn (1/s,2/s,4/s), or inf: all at once."),
    ] = None,
    arrivals: Annotated[
        str, typer.Option(help="poisson, burst (Gamma-distributed gaps), or trace (the trace's own times).")
    ] = "poisson",
    burstiness: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="burst: shape of the Gamma distribution; 1 is poisson, lower is burstier. Default: 0.25."
        ),
    ] = None,
    workload: options.WORKLOAD = None,
    columns: options.COLUMNS = None,
    scale_to_context: options.SCALE_TO_CONTEXT = False,
    num: Annotated[
        int | None, typer.Option("--num", "-n", min=1, help="Requests per rate. Default: 100, or the trace's.")
    ] = None,
    duration: Annotated[
        str | None, typer.Option(help="Instead of --num: all requests that arrive within this time.")
    ] = None,
    latency_bound: Annotated[
        str | None, typer.Option("--latency-bound", "-l", help=f"{options.LATENCY_BOUND_HELP} It {_PER_REQUEST}.")
    ] = None,
    ttft: Annotated[str | None, typer.Option(help="A bound on the time to first token, also for goodput.")] = None,
    tpot: Annotated[str | None, typer.Option(help="A bound on the time per output token, also for goodput.")] = None,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of unanswered requests; others wait in this client.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option(help="Force outputs to the drawn lengths, by a key that vLLM, SGLang and exegpt support.")
    ] = True,
    max_tokens_factor: Annotated[
        float,
        typer.Option(help="Send max_tokens as this multiple of the drawn length; disconnect at the drawn length."),
    ] = 1.0,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A directory with the model's tokenizer.json, for texts of exact lengths.")
    ] = None,
    vocab: Annotated[
        int | None, typer.Option(min=1, help="Token ids are below this. Default: the tokenizer's, else 256.")
    ] = None,
    retry: Annotated[int, typer.Option(min=0, help="Retries of a request after a 429's or 503's Retry-After.")] = 0,
    timeout: Annotated[str, typer.Option(help="Time limit of one answer; inf: none.")] = "10m",
    warm_up: Annotated[int, typer.Option(min=0, help="Requests sent first, not measured.")] = 0,
    seed: options.SEED = 0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write a JSON line per request to this file.")] = None,
    plot: Annotated[bool, typer.Option("--plot", help="Draw throughput over latency in the terminal.")] = False,
    report: options.REPORT = None,
    json: options.JSON = False,
) -> None:
    """Load-test an OpenAI-compatible endpoint (exegpt, vLLM, SGLang, transformers) in an open loop.

    Requests are sent at their arrival times, whether or not earlier ones have been answered. The API key is read from
    OPENAI_API_KEY.

    Example: exegpt bench serve --url http://localhost:8000 --rate 1/s,2/s,4/s --workload 128/64 --latency-bound 5s
    """
    from exegpt.loadtest.load_options import LoadOptions
    from exegpt.loadtest.load_test import plan, run
    from xcore.console import output

    load = plan(options.build(LoadOptions, locals()))
    runs = run(load, output.note)
    from exegpt.loadtest import report as shown

    if report:
        shown.write_report(report, load, runs)
    if json:
        output.notes(shown.warnings(load, runs))
        return output.emit(
            {
                "endpoint": {"url": url, "model": load.endpoint.model, "api": api, "context": load.endpoint.context},
                "load": shown.described(load),
                "runs": [measured.document() for measured in runs],
                "assumptions": [*load.notes, *shown.without_done(runs)],
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
