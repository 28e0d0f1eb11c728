"""`exegpt bench serve`: an open-loop load test of an OpenAI-compatible endpoint."""

from exegpt.options.bench_serve import LoadOptions
from exegpt.options.option_record import command


@command
def serve(options: LoadOptions) -> None:
    """Load-test an OpenAI-compatible endpoint (exegpt, vLLM, SGLang, transformers) in an open loop.

    Requests are sent at their arrival times, whether or not earlier ones have been answered. The API key is read from
    OPENAI_API_KEY.

    Example: exegpt bench serve --url http://localhost:8000 --rate 1/s,2/s,4/s --workload 128/64 --latency-bound 5s
    """
    from exegpt.loadtest.load_test import plan, run
    from xcore.console import output

    load = plan(options)
    runs = run(load, output.note)
    from exegpt.loadtest import report as shown

    if options.report:
        shown.write_report(options.report, load, runs)
    if options.json:
        output.notes(shown.warnings(load, runs))
        return output.emit(
            {
                "endpoint": {
                    "url": options.url,
                    "model": load.endpoint.model,
                    "api": options.api,
                    "context": load.endpoint.context,
                },
                "load": shown.described(load),
                "runs": [measured.document() for measured in runs],
                "assumptions": [*load.notes, *shown.without_done(runs)],
                "provenance": output.provenance(seed=options.seed),
            }
        )
    output.notes([f"{load.endpoint.model} at {options.url}; {shown.described(load)}", *load.notes])
    output.table(shown.RUN_COLUMNS, shown.run_rows(load, runs))
    if len(runs) == 1:
        output.table(shown.TIME_COLUMNS, shown.time_rows(runs[0]))
    if options.plot:
        from exegpt.report import terminal

        print(terminal.plot(shown.series(load, runs), load.bounds.latency_s))
    output.notes(shown.sentences(load, runs))
