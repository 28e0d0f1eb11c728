"""`exegpt serve`: an OpenAI-compatible server that keeps a latency bound, of one model or of a plan's."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from exegpt.cli.key_files import ADMIN_TOKEN, API_KEY, keys, node_token
from exegpt.options.option_record import command, option, option_name, option_words, typed_options
from exegpt.options.served import OneModelOptions, ServedOptions
from exegpt.options.shared_options import PLUGIN
from exegpt.options.values import directories, only_model, plan_rankers
from xcore.console.output import LOG_FORMAT
from xcore.errors import InputError
from xcore.frozen_heap import imports

if TYPE_CHECKING:
    from xcore.specs.cluster_plan import Plan
    from xserver.engines.residency import ResidencyOptions
    from xserver.engines.supervisor import Watching
    from xserver.engines.unit_options import EngineUnitOptions
    from xserver.nodes.node_link import NodeAddress

_TOKEN_FILE = "--node-token-file"
_OF_ORDER = {"order", "ranker"}
"""Options of a single model that a plan takes too."""
_REPLAN_AFTER = "1m"
"""Default of --replan-after: a burst is over by then, and starting a new engine takes some seconds."""


@dataclass(frozen=True, kw_only=True)
class PlanDeterminedOptions(OneModelOptions):
    """The options of a single model, which a plan determines."""

    ranks: int = option(1, "Ranks of the engine, one per device, under mpirun.", min=1)
    served_model_name: str | None = option(None, "The model's name in the API. Default: the directory's name.")
    chat_template: Path | None = option(None, "A Jinja file that replaces the model's own chat template.")
    tool_parser: str | None = option(
        None, "The format of tool calls: hermes, llama3_json, mistral or json. Default: that of the chat template."
    )
    reasoning_parser: str | None = option(
        None,
        "Return reasoning in its own field. Its format: qwen3, deepseek-r1 or think. Default: it stays in the text.",
    )
    json_whitespace: bool = option(
        False, "Allow any white space in JSON outputs. Default: at most one space between elements."
    )


@dataclass(frozen=True, kw_only=True)
class FrontendOptions:
    """The options of the HTTP server."""

    host: str = option("127.0.0.1", "The address to listen on. Without API keys, it must be a loopback address.")
    port: int = option(8000, "The port to listen on.", min=1, max=65535)
    api_key_file: Path | None = option(
        None,
        "A file with one API key per line, read again on SIGHUP. Default: the environment's EXEGPT_API_KEY, if set.",
    )
    admin_token_file: Path | None = option(
        None,
        "A file with the token for POST /schedule, /plan and /drain, read again on SIGHUP. Default: the environment's "
        "EXEGPT_ADMIN_TOKEN, if set.",
    )
    allowed_host: list[str] | None = option(None, "Another host name of this server, if it has no API keys.")
    cors: list[str] | None = option(
        None,
        "An origin whose pages may use this server, like https://example.com. With API keys, * allows all origins.",
    )
    separate_keys: bool = option(
        False, "Share cached prefixes only among requests with the same API key. Default: among all requests."
    )
    max_output: int | None = option(None, "Maximum output tokens of a request.", min=1)
    max_waiting: int = option(1000, "Maximum number of waiting sequences.", min=1)
    journal: Path | None = option(None, "A folder that keeps requests with an Idempotency-Key across restarts.")
    answer_ttl: str = option("10m", "The time for which answers to requests with an Idempotency-Key are kept.")
    drain_timeout: str = option("1m", "Maximum duration of a drain.")
    stall_timeout: str = option("1m", "Disconnect a client that reads nothing for this long.")
    max_connections: int = option(
        4096, "Maximum connections of one client address; a proxy has one for all its clients.", min=1
    )
    keep_alive: str = option("5s", "The time for which a connection without requests stays open.")
    log_format: str = option("text", "The log's format: text, or json (one JSON line per event on standard error).")
    log_requests: bool = option(
        False, "Log a line per request, without any of its text.", "--log-requests/--no-log-requests"
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "The URL to send OpenTelemetry traces to. Default: the environment's "
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, if set.",
    )


@dataclass(frozen=True, kw_only=True)
class ServeOptions(PlanDeterminedOptions, ServedOptions, FrontendOptions):
    """The models, their engines, and the HTTP server."""

    model: list[str] | None = option(
        None, "A model directory with a tokenizer.json; with --plan, NAME=DIR for each.", "-m"
    )
    plan: Path | None = option(None, "Serve the models of this plan, written by `exegpt plan --out`.")
    replan_after: str | None = option(
        None,
        "With --plan: plan again when request rates have differed from the plan's for this long; inf: never. "
        "Default: 1m.",
    )
    node: list[str] | None = option(
        None,
        "With --plan: where a node of the plan is, as NODE=HOST:PORT of its `exegpt launch`, or NODE=local. Repeat it.",
    )
    node_token_file: Path | None = option(
        None, "With --node: a file with the launchers' token. Default: the environment's EXEGPT_NODE_TOKEN, if set."
    )
    resident: int | None = option(
        None,
        "With --plan: most engines that are loaded at once. A request to another model waits until its engine has "
        "taken the place of an idle one. Default: all.",
        min=1,
    )
    warm_models: str | None = option(
        None,
        "With --resident: which models are loaded before their turn. lru (default): none; epwq: those of waiting "
        "requests; prewarm: also those of the calls that --graphs expect, by --knob.",
    )
    plugin: list[Path] | None = PLUGIN
    engine_socket: Path | None = option(None, "Where launched ranks connect.", hidden=True)


@command
def serve(options: ServeOptions) -> int:
    """Serve a model over HTTP with OpenAI's API, under the schedule with the highest goodput within a latency bound.

    With --plan, serve the models of a plan; with --node, on the plan's nodes.

    Example: exegpt serve --model DIR --latency-bound 5s --workload 512/128

    Example: exegpt serve --plan plan.json --order learned --ranker chat=chat.npz --ranker code=code.npz

    Example: exegpt serve --plan plan.json --node 0=local --node 1=10.0.0.2:8100 --node-token-file token
    """
    from xrunner.comm.ranks import ranks_started

    if options.log_format not in ("text", "json"):
        raise InputError(f"--log-format '{options.log_format}' is not known: use text or json.")
    os.environ[LOG_FORMAT] = options.log_format
    if ranks_started() > 1 and options.plan is None:
        return _serve_as_rank(options)
    return _serve(options)


@dataclass(frozen=True)
class _Engines:
    """The engines to start, and the plan that they follow."""

    units: "tuple[EngineUnitOptions, ...]"
    starts: int = 1
    plan: "Plan | None" = None
    replan: "Callable[[Plan], tuple[Plan, tuple[EngineUnitOptions, ...]]] | None" = None
    watching: "Watching | None" = None
    nodes: "tuple[NodeAddress, ...]" = ()
    node_token: str | None = None


def _serve(options: ServeOptions) -> int:
    """Run the frontend, and the engines under it unless a launcher has started one."""
    with imports():
        from xcore.duration import parse_duration
        from xserver.engines import supervisor

    engines = _planned(options, options.plan) if options.plan else _Engines((_unit(options),))
    return supervisor.run(
        supervisor.ServerOptions(
            units=engines.units,
            starts=engines.starts,
            plan=engines.plan,
            replan=engines.replan,
            watching=engines.watching,
            host=options.host,
            port=options.port,
            api_keys=keys(options.api_key_file, API_KEY),
            read_api_keys=partial(keys, options.api_key_file, API_KEY) if options.api_key_file else None,
            hosts=tuple(options.allowed_host or ()),
            origins=tuple(options.cors or ()),
            admin_token=next(iter(keys(options.admin_token_file, ADMIN_TOKEN)), None),
            read_admin_tokens=partial(keys, options.admin_token_file, ADMIN_TOKEN)
            if options.admin_token_file
            else None,
            residency=_residency(options),
            nodes=engines.nodes,
            node_token=engines.node_token,
            separate_keys=options.separate_keys,
            max_output=options.max_output,
            max_waiting=options.max_waiting,
            journal=options.journal,
            answer_ttl_s=parse_duration(options.answer_ttl) or inf,
            drain_timeout_s=parse_duration(options.drain_timeout) or inf,
            stall_timeout_s=parse_duration(options.stall_timeout) or inf,
            max_connections=options.max_connections,
            keep_alive_s=parse_duration(options.keep_alive) or inf,
            log_requests=options.log_requests,
            otlp_traces_endpoint=options.otlp_traces_endpoint,
        )
    )


def _unit(options: ServeOptions) -> "EngineUnitOptions":
    """Return the engine of one model."""
    of_plans = {"--replan-after": options.replan_after, "--node": options.node, _TOKEN_FILE: options.node_token_file}
    for name, value in of_plans.items():
        if value:
            raise InputError(f"{name} needs a plan: pass --plan, or leave it out.")
    from exegpt.cli.engine import engine_options
    from xcore.choices import admission_rule
    from xcore.files import model_directory, read_schedule
    from xserver.engines.unit_options import EngineUnitOptions, UnitModel
    from xserver.text.message_formats import MessageFormats

    directory, schedule = model_directory(only_model(options.model, "server")), options.schedule
    engine_options(options, str(directory))  # refuse at once what the engine would refuse
    admission_rule(options.admission, read_schedule(schedule).policy if schedule else None)
    formats = MessageFormats(
        options.chat_template, options.tool_parser, options.reasoning_parser, options.json_whitespace
    )
    return EngineUnitOptions(
        (UnitModel(directory, options.served_model_name, formats),),
        ("--model", str(directory), *_words(typed_options(options, ServedOptions))),
        ranks=options.ranks,
        engine_socket=options.engine_socket,
    )


def _planned(options: ServeOptions, path: Path) -> _Engines:
    """Return the engines of a plan."""
    from exegpt.cli.node_addresses import node_addresses
    from xmulti.serving.planned_units import in_places, planned_units, read_plan, with_directories
    from xmulti.serving.ranked_order import order_flags, ranked_order
    from xmulti.sharing.plan_order import RUN, check_order
    from xrunner.comm.ranks import ranks_started

    of_residency = {"graphs", "knob"} if options.resident else set()
    for name in typed_options(options, PlanDeterminedOptions):
        if name not in of_residency | _OF_ORDER:
            raise InputError(f"The plan determines {option_name(name)}: leave it or --plan out.")
    if ranks_started() > 1:
        raise InputError("A server of a plan starts its ranks itself: start it without mpirun.")
    check_order(options.order, RUN)
    at, addresses = node_addresses(options.node)
    if options.node_token_file and not addresses:
        raise InputError(f"{_TOKEN_FILE} is for launchers: pass --node NODE=HOST:PORT too, or leave it out.")
    plan = read_plan(path, directories(options.model), at)
    token = node_token(options.node_token_file, _TOKEN_FILE) if addresses else None
    rankers = plan_rankers(options.ranker)
    if options.order and addresses:
        raise InputError(
            f"--order {options.order} is for engines on this machine, but --node names launchers: leave one out."
        )
    ranked_order(options.order, rankers, {model.name: str(model.directory) for model in plan.models})
    passed_on = typed_options(options, ServedOptions)
    for name in ("threads", *of_residency, *_OF_ORDER):  # each engine has its part of the threads, and its rankers
        passed_on.pop(name, None)
    flags, of_unit = _words(passed_on), partial(order_flags, options.order, rankers)
    in_use = {model.name: str(model.directory) for model in plan.models}

    current = plan

    def placed(asked: "Plan") -> "tuple[Plan, tuple[EngineUnitOptions, ...]]":
        """Return a plan for these models with the directories in use, and its engines, which succeed the last ones."""
        nonlocal current
        followed = with_directories(asked, in_use, "The plan", at)
        current = in_places(followed, current)
        return followed, planned_units(current, flags, options.threads, at, of_unit, promises=True)

    units = planned_units(plan, flags, options.threads, at, of_unit, promises=True)
    # Engines measure a new machine when they start. On the cores of one CPU, they would disturb each other.
    starts = 1 if plan.cluster.is_cpu else len(units)
    if options.resident:
        if several := next((name for name, replicas in plan.replicas.items() if len(replicas) > 1), None):
            raise InputError(
                f"--resident {options.resident} needs one engine for each model, but '{several}' has several replicas: "
                "leave it out, or plan with --replicas 1."
            )
        return _Engines(units, starts, plan, nodes=addresses, node_token=token)
    return _Engines(units, starts, plan, placed, _watching(options), addresses, token)


def _residency(options: ServeOptions) -> "ResidencyOptions | None":
    """Return how many engines are loaded at once, and by which policy; None: all are."""
    from xcore.applications.warming import KNOB, WARMING
    from xcore.choices import check_choice
    from xserver.engines.residency import ResidencyOptions

    if options.resident is None:
        if options.warm_models is not None:
            raise InputError(
                f"--warm-models {options.warm_models} needs --resident: pass the number of loaded engines."
            )
        return None
    policy = options.warm_models or "lru"
    check_choice(policy, WARMING, "--warm-models")
    if options.plan is None:
        raise InputError(
            f"--resident {options.resident} needs a plan of several engines: pass --plan, or leave it out."
        )
    if options.replan_after is not None:
        raise InputError("--replan-after needs all engines of the plan: leave it or --resident out.")
    if policy == "prewarm" and options.graphs is None:
        raise InputError("--warm-models prewarm needs --graphs FILE: learn demand graphs with `exegpt graphs learn`.")
    for name, value in (("--graphs", options.graphs), ("--knob", options.knob)):
        if value is not None and policy != "prewarm":
            raise InputError(f"{name} {value} is only for --warm-models prewarm, but it is {policy}: leave it out.")
    residency = ResidencyOptions(
        options.resident, policy, KNOB if options.knob is None else options.knob, options.graphs
    )
    residency.models()  # refuse at once graphs that can't be read
    return residency


def _watching(options: ServeOptions) -> "Watching":
    """Return a function that creates the `Replanning` of a plan.

    With --pinned or --replan-after inf, it never searches for another plan.
    """
    from xcore.duration import parse_duration
    from xmulti.serving.replanning import Replanning, ReplanOptions

    after_s = parse_duration(options.replan_after or _REPLAN_AFTER)
    return partial(Replanning, options=None if options.pinned or after_s is None else ReplanOptions(after_s))


def _words(typed: Mapping[str, object]) -> list[str]:
    """Return options as words of a command line."""
    return [word for name, value in typed.items() for word in option_words(name, value)]


def _serve_as_rank(options: ServeOptions) -> int:
    """Run a rank of the engine; the first rank starts the frontend before MPI is initialised."""
    import signal
    import sys

    with imports():
        from exegpt.api import serving_engine
        from exegpt.api.frontend_process import FrontendProcess
        from exegpt.cli.engine import engine_options
        from xrunner.comm.ranks import job, rank_started

    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the launcher sends it to all ranks: rank 0 drains for them
    frontend = FrontendProcess(sys.argv[1:]) if rank_started() == 0 else None
    with job() as ranks:
        socket = frontend.socket if frontend else None
        asked = ranks.attempt(lambda: engine_options(options, only_model(options.model, "server"), socket))
        serving_engine.serve(asked, ranks)
    return frontend.wait() if frontend else 0
