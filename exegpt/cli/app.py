"""The commands by name; their modules import what they need when called, so that `--help` is fast."""

from functools import cache
from typing import TYPE_CHECKING

import typer
from typer.main import get_command

from exegpt.cli import (
    bench,
    bench_serve,
    demo,
    engine,
    graphs,
    launch,
    learned_outputs,
    listing,
    model,
    plan,
    profile,
    profile_import,
    rank,
    reproduce,
    run,
    serve,
    show,
    simulate,
    tune,
)

if TYPE_CHECKING:
    from typer._click import Command

app = typer.Typer(
    help="Find and run the LLM-serving schedule with the highest throughput under a latency bound.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for command, about in (  # a line of `exegpt --help` each; each command's own --help has more
    (demo.demo, "Profile, tune, run and compare a small model on this machine."),
    (tune.tune, "Find the schedule with the highest throughput under a bound."),
    (run.run, "Run requests offline, and compare with the prediction."),
    (serve.serve, "Serve a model over HTTP, with OpenAI's API."),
    (launch.launch, "Run a node's engines for a server elsewhere."),
    (plan.plan, "Divide a cluster's devices among several models."),
    (simulate.simulate, "Predict the performance of a schedule or of engine settings."),
    (show.show, "Print a schedule, plan, profile, result or cluster file."),
):
    app.command(short_help=about)(command)
app.command("engine", hidden=True)(engine.engine)
app.command("list")(listing.list_)

_model = typer.Typer(help="Create and quantise model directories.", no_args_is_help=True, rich_markup_mode=None)
_model.command("create")(model.create)
_model.command("quantize")(model.quantize)
app.add_typer(_model, name="model")

_outputs = typer.Typer(help="Learn output lengths from answers.", no_args_is_help=True, rich_markup_mode=None)
_outputs.command("learn", short_help="Learn output lengths from answers, some of them cut off.")(learned_outputs.learn)
app.add_typer(_outputs, name="outputs", short_help="Learn output lengths from answers.")

_profile = typer.Typer(rich_markup_mode=None)
_profile.callback(invoke_without_command=True)(profile.profile)
_profile.command("import")(profile_import.import_)
app.add_typer(_profile, name="profile", short_help="Measure a model's layers, or import measurements.")

_bench = typer.Typer(rich_markup_mode=None, cls=bench.BenchGroup)
_bench.callback(invoke_without_command=True)(bench.bench)
_bench.command("serve", short_help="Load-test an OpenAI-compatible endpoint.")(bench_serve.serve)
app.add_typer(_bench, name="bench", short_help="Compare policies and other engines; load-test an endpoint.")

_rank = typer.Typer(help="Train and evaluate the learned order's ranker.", no_args_is_help=True, rich_markup_mode=None)
_rank.command("train", short_help="Train a ranker on prompts and lengths.")(rank.train)
_rank.command("evaluate", short_help="Compare a ranker's Kendall's tau with baselines.")(rank.evaluate)
app.add_typer(_rank, name="rank", short_help="Train and evaluate the learned order's ranker.")

_graphs = typer.Typer(help="Learn and show demand graphs of applications.", no_args_is_help=True, rich_markup_mode=None)
_graphs.command("learn", short_help="Learn demand graphs from a log of calls.")(graphs.learn)
_graphs.command("show", short_help="Print the units of demand graphs.")(graphs.show)
app.add_typer(_graphs, name="graphs", short_help="Learn and show demand graphs of applications.")

app.add_typer(reproduce.app, name="reproduce", short_help="Reproduce the papers' tables and figures.")


@app.callback(invoke_without_command=True)
def _version(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from xcore import __version__

        print(__version__)
        raise typer.Exit


@cache
def whole_command() -> "Command":
    """Return all commands with their options: building them takes 20 ms, as long as a short command."""
    return get_command(app)
