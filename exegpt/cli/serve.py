"""`exegpt serve`: an OpenAI-compatible server that keeps a latency bound, of one model or of a plan's."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exegpt.cli import options
from xcore.console.output import LOG_FORMAT
from xcore.errors import InputError

if TYPE_CHECKING:
    from exegpt.api.serving_engine import EngineOptions
    from xcore.specs.cluster_plan import Plan
    from xmulti.serving.replanning import Replanning
    from xserver.engines.unit_options import EngineUnitOptions

_ENGINES = (
    "schedule latency_bound workload columns policy admission order ranker device attention dtype threads".split()
)
"""Options with a value that are passed to the engine."""
_FLAGS = "pinned best_effort starvation_guard scale_to_context".split()
"""Options without a value that are passed to the engine."""
_PLANNED = "device attention dtype".split()
"""Options that are passed to each engine of a plan."""
_REPLAN_AFTER = "1m"
"""Default of --replan-after: a burst is over by then, and starting a new engine takes some seconds."""
_NO_PLAN = {"plan": None, "replan": None, "watching": None}
_OF_ONE = (
    "schedule latency_bound workload columns scale_to_context ranks served_model_name chat_template policy admission "
    "order starvation_guard ranker best_effort"
).split()
"""Options that a plan determines."""


def serve(
    model: Annotated[
        list[str] | None,
        typer.Option("--model", "-m", help="A model directory with a tokenizer.json; with --plan, NAME=DIR for each."),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Serve the models of this plan, written by `exegpt plan --out`.")
    ] = None,
    schedule: Annotated[
        Path | None, typer.Option("--schedule", "-s", help="A schedule file. Default: profile, then search.")
    ] = None,
    latency_bound: Annotated[
        str | None, typer.Option("--latency-bound", "-l", help=options.LATENCY_BOUND_HELP + " Default: none.")
    ] = None,
    workload: options.WORKLOAD = None,
    columns: options.COLUMNS = None,
    scale_to_context: options.SCALE_TO_CONTEXT = False,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of the engine, one per device, under mpirun.")] = 1,
    host: Annotated[str, typer.Option(help="Address to listen on; without keys only loopback.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name in the API. Default: the directory's name.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="A Jinja file that replaces the model's own chat template.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="A file with an API key per line. Default: EXEGPT_API_KEY, if set.")
    ] = None,
    admin_token_file: Annotated[
        Path | None,
        typer.Option(help="A file with the token for POST /schedule, /plan and /drain. Default: EXEGPT_ADMIN_TOKEN."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="A further host name of this server, if it has no keys.")
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(help="An origin whose pages may use this server: https://example.com; with keys, * is all."),
    ] = None,
    max_output: Annotated[int | None, typer.Option(min=1, help="Maximum output tokens of a request.")] = None,
    max_waiting: Annotated[int, typer.Option(min=1, help="Maximum number of waiting sequences.")] = 1000,
    journal: Annotated[
        Path | None, typer.Option(help="A folder that keeps requests with an Idempotency-Key across restarts.")
    ] = None,
    answer_ttl: Annotated[str, typer.Option(help="How long the answers of such requests are kept.")] = "10m",
    drain_timeout: Annotated[str, typer.Option(help="Maximum duration of a drain.")] = "1m",
    stall_timeout: Annotated[str, typer.Option(help="Disconnect a client that has read nothing for this long.")] = "1m",
    log_format: Annotated[str, typer.Option(help="text, or json: a JSON line per event on standard error.")] = "text",
    log_requests: Annotated[bool, typer.Option(help="Log a line per request, without any of its text.")] = False,
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(help="URL to send OpenTelemetry traces to. Default: OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, if set."),
    ] = None,
    policy: options.POLICY = None,
    admission: options.ADMISSION = None,
    order: options.ORDER = None,
    starvation_guard: options.STARVATION_GUARD = False,
    ranker: options.RANKER = None,
    device: options.DEVICE = None,
    attention: options.ATTENTION = None,
    dtype: options.RUN_DTYPE = None,
    threads: options.THREADS = None,
    pinned: Annotated[
        bool,
        typer.Option("--pinned", help="Keep schedules and the plan even if lengths or rates drift."),
    ] = False,
    replan_after: Annotated[
        str | None,
        typer.Option(
            help="Plan again when request rates have differed from the plan's for this long; inf: never. Default: 1m."
        ),
    ] = None,
    best_effort: Annotated[
        bool,
        typer.Option(
            "--best-effort",
            help="Also serve under a bound that no schedule keeps for 99% of requests; accept those that can meet it.",
        ),
    ] = False,
    plugin: options.PLUGIN = None,
    engine_socket: Annotated[Path | None, typer.Option(hidden=True, help="Where launched ranks connect.")] = None,
) -> int:
    """Serve a model over HTTP with OpenAI's API, under the schedule with the highest goodput within a latency bound.

    With --plan, serve several models by a plan.

    Example: exegpt serve --model DIR --latency-bound 5s --workload 512/128
    """
    typed = dict(locals())
    from xrunner.comm.ranks import ranks_started

    if log_format not in ("text", "json"):
        raise InputError(f"--log-format {log_format} is neither text nor json.")
    os.environ[LOG_FORMAT] = log_format
    if ranks_started() > 1 and plan is None:
        return _serve_as_rank(typed)
    return _serve(typed)


def _serve(typed: dict[str, Any]) -> int:
    """Run the frontend, and the engines under it unless a launcher has started one."""
    from xcore.duration import parse_duration
    from xserver.engines import supervisor

    read = {
        **(_planned(typed) if typed["plan"] else {"units": (_unit(typed),), "starts": 1, **_NO_PLAN}),
        "api_keys": _keys(typed["api_key_file"], "EXEGPT_API_KEY"),
        "admin_token": next(iter(_keys(typed["admin_token_file"], "EXEGPT_ADMIN_TOKEN")), None),
        "hosts": tuple(typed["allowed_host"] or ()),
        "origins": tuple(typed["cors"] or ()),
        "answer_ttl_s": parse_duration(typed["answer_ttl"]) or float("inf"),
        "drain_timeout_s": parse_duration(typed["drain_timeout"]) or float("inf"),
        "stall_timeout_s": parse_duration(typed["stall_timeout"]) or float("inf"),
    }
    return supervisor.run(options.build(supervisor.ServerOptions, typed | read))


def _unit(typed: dict[str, Any]) -> "EngineUnitOptions":
    """Return the engine of one model."""
    if typed["replan_after"] is not None:
        raise InputError("--replan-after needs a plan: pass --plan, or leave it out.")
    from exegpt.cli.engine import read_options
    from xcore.choices import admission_rule
    from xcore.files import model_directory, read_schedule
    from xserver.engines.unit_options import EngineUnitOptions, UnitModel

    directory, schedule = model_directory(options.only_model(typed["model"], "server")), typed["schedule"]
    read_options(typed | {"model": directory})  # refuse at once what the engine would refuse
    admission_rule(typed["admission"], read_schedule(schedule).policy if schedule else None)
    return EngineUnitOptions(
        (UnitModel(directory, typed["served_model_name"], typed["chat_template"]),),
        ("--model", str(directory), *_words(typed, _ENGINES), *_words(typed, _FLAGS)),
        ranks=typed["ranks"],
        engine_socket=typed["engine_socket"],
    )


def _planned(typed: dict[str, Any]) -> dict[str, Any]:
    """Return the engines of a plan, and how many may start at once."""
    from xmulti.serving.planned_units import planned_units, read_plan, with_directories
    from xrunner.comm.ranks import ranks_started

    for name in _OF_ONE:
        if typed[name] not in (None, False) and (name, typed[name]) != ("ranks", 1):
            raise InputError(
                f"{_option(name)} is for a single model, and the plan determines it: leave it or --plan out."
            )
    if ranks_started() > 1:
        raise InputError("A server of a plan starts its ranks itself: start it without mpirun.")
    plan = read_plan(typed["plan"], options.directories(typed["model"]))
    flags, order = [*_words(typed, _PLANNED), *_words(typed, ["pinned"])], [model.name for model in plan.models]
    directories = {model.name: str(model.directory) for model in plan.models}

    def placed(asked: "Plan") -> "tuple[Plan, tuple[EngineUnitOptions, ...]]":
        """Return a plan for these models with the directories in use, and its engines."""
        followed = with_directories(asked, directories, "The plan")
        ours = sorted(followed.models, key=lambda model: order.index(model.name))
        return followed, planned_units(replace(followed, models=tuple(ours)), flags, typed["threads"])

    units = planned_units(plan, flags, typed["threads"])
    # Engines measure a new machine when they start. On the cores of one CPU, they would disturb each other.
    starts = 1 if plan.cluster.is_cpu else len(units)
    return {"units": units, "starts": starts, "plan": plan, "replan": placed, "watching": _watching(typed)}


def _watching(typed: dict[str, Any]) -> "Callable[..., Replanning]":
    """Return the function that makes the watch over a plan.

    With --pinned or --replan-after inf, the watch searches no other plan.
    """
    from xcore.duration import parse_duration
    from xmulti.serving.replanning import Replanning, ReplanOptions

    after_s = parse_duration(typed["replan_after"] or _REPLAN_AFTER)
    options = None if typed["pinned"] or after_s is None else ReplanOptions(after_s)
    return partial(Replanning, options=options)


def _words(typed: dict[str, Any], names: list[str]) -> list[str]:
    """Return the options with these names that the user passed, as words of a command line."""
    words = []
    for name in names:
        if typed[name] not in (None, False):
            words += [_option(name)] if typed[name] is True else [_option(name), str(typed[name])]
    return words


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _serve_as_rank(typed: dict[str, Any]) -> int:
    """Run a rank of the engine; the first rank starts the frontend before MPI is initialised."""
    import signal
    import sys

    from exegpt.api import serving_engine
    from exegpt.api.frontend_process import FrontendProcess
    from xrunner.comm.ranks import job, rank_started

    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the launcher sends it to all ranks: rank 0 drains for them
    frontend = FrontendProcess(sys.argv[1:]) if rank_started() == 0 else None
    with job() as ranks:
        socket = frontend.socket if frontend else None
        asked = ranks.attempt(lambda: _engine_options(typed, socket))
        serving_engine.serve(asked, ranks)
    return frontend.wait() if frontend else 0


def _engine_options(typed: dict[str, Any], socket: Path | None) -> "EngineOptions":
    from exegpt.cli.engine import read_options

    return read_options(typed | {"model": options.only_model(typed["model"], "server")}, socket)


def _keys(path: Path | None, variable: str) -> tuple[str, ...]:
    """Return a file's keys, one per line, or the key in the environment variable."""
    if path is None:
        return tuple(filter(None, [os.environ.get(variable)]))
    from xcore.document import read_text

    if not path.is_file():
        raise InputError(f"There is no key file '{path}': write one key per line.")
    keys = tuple(line.strip() for line in read_text(path).splitlines() if line.strip())
    if not keys:
        raise InputError(f"'{path}' has no key: write one key per line.")
    return keys
