"""`exegpt tune`: the schedule with the highest throughput under a latency bound."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from exegpt.options import groups
from exegpt.options.record import command
from exegpt.options.values import only_profile, profile_files
from xcore.errors import InputError

if TYPE_CHECKING:
    from xscheduler.export import Target
    from xscheduler.setting_search import SearchOptions
    from xscheduler.settings import Setting


@dataclass(frozen=True, kw_only=True)
class BoundOptions:
    """The bounds, and who must keep them."""

    latency_bound: Annotated[
        str | None,
        typer.Option(
            "--latency-bound",
            "-l",
            help=groups.LATENCY_BOUND_HELP
            + " Several bounds, separated by commas, give the frontier. Default with --ttft or --tpot: inf.",
        ),
    ] = None
    bound: Annotated[
        str,
        typer.Option(
            "--bound",
            help="The meaning of the latency bound. requests (also p99-queries): --percentile of all requests keep it. "
            "p99-length: a sequence of the 99th-percentile output length keeps it, as in the ExeGPT paper.",
        ),
    ] = "requests"
    percentile: Annotated[
        float, typer.Option("--percentile", help="The share of requests in % that keeps each bound: 50 to 99.9.")
    ] = 99.0
    ttft: Annotated[
        str | None, typer.Option(help="A bound on the time to first token, for --percentile of the requests.")
    ] = None
    tpot: Annotated[
        str | None, typer.Option(help="A bound on the time per output token, for --percentile of the requests.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class SearchMethodOptions:
    """Which schedules are searched, how, and on which machine."""

    policy: groups.POLICY = None
    search: Annotated[str, typer.Option(help="bnb (branch and bound), exhaustive or optuna")] = "bnb"
    tolerance: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="The share by which a space may violate monotonicity.")
    ] = 0.0
    admission: Annotated[str, typer.Option(help=groups.ADMISSION_HELP + " auto: the better of both.")] = "reserve"
    prefix_caching: Annotated[
        bool,
        typer.Option(
            "--prefix-caching",
            help="With --rate: reuse KV blocks of prompts that begin with the same tokens (orca, chunked). The trace's "
            "columns say which do: hash_ids, prompt_ids, prefix_id with prefix_tokens, session_id, conversation_id, "
            "chat_id.",
        ),
    ] = False
    device: groups.DEVICE = None
    threads: groups.THREADS = None


@dataclass(frozen=True, kw_only=True)
class ArrivalOptions:
    """Requests that arrive over time, and the prices of clusters that serve them."""

    rate: groups.RATE = None
    arrivals: Annotated[
        str, typer.Option(help="Arrivals: poisson (at --rate), or trace (its own times, scaled to --rate if given).")
    ] = "poisson"
    price: Annotated[Path | None, typer.Option(help=groups.PRICE_HELP + " The answer is the cheapest cluster.")] = None
    seed: groups.SEED = 0

    @property
    def open_system(self) -> bool:
        """Whether requests arrive over time."""
        return self.rate is not None or self.arrivals == "trace"


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """What is printed and written."""

    advice: Annotated[
        bool | None,
        typer.Option(
            "--advice/--no-advice",
            help="Predict the effect of a looser bound and of other clusters. Default: only for one bound and up to "
            "eight devices.",
        ),
    ] = None
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Print all reasons for each policy's rank, and what limits it. Default: the main reason."
        ),
    ] = False
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Write the schedule to this file; with several bounds, that of the last feasible one."
        ),
    ] = None
    export: Annotated[
        str | None, typer.Option(help="Print the launch command of the best schedule that an engine runs: vllm.")
    ] = None
    report: groups.REPORT = None


@dataclass(frozen=True, kw_only=True)
class TuneOptions(
    BoundOptions,
    groups.ProblemOptions,
    SearchMethodOptions,
    groups.ControlOptions,
    groups.PredictionOptions,
    groups.TraceOptions,
    ArrivalOptions,
    AnswerOptions,
    groups.PluginOptions,
):
    """A search problem, and its output."""


@command
def tune(options: TuneOptions) -> int:
    """Find the schedule with the highest throughput under a latency bound.

    Example: exegpt tune --latency-bound 5s --model llama-3.1-8b --cluster 1xH100-SXM --workload 2048/256

    With --rate, requests arrive over time and latency counts from arrival. With several clusters, separated by commas,
    and --price, the answer is the cheapest cluster that sustains the rate.

    Control variables that are given are fixed, and policies without one are left out.

    Example: exegpt tune --ttft 1s --model llama-3.1-8b --cluster 1xH100-SXM --max-num-seqs 64

    Example: exegpt tune --latency-bound 5s --rate 20/s --cluster 2xA40,4xA40,1xH100-SXM --price prices.yaml

    Example: exegpt tune --ttft 1s --rate 5/s --workload trace.jsonl --admission grow --prefix-caching
    """
    from exegpt.api.tuning import PATTERNS, TuneProblem
    from exegpt.cli import bounded, rated
    from xcore.choices import check_choice, check_columns
    from xcore.duration import parse_duration
    from xcore.files import check_distinct, check_output
    from xcore.specs.price import read_prices
    from xcore.traces.trace import parse_rate
    from xrunner.threads import set_threads

    check_output(options.out)
    check_output(options.report)
    clusters = [part.strip() for part in options.cluster.split(",")] if options.cluster else [None]
    inputs = (options.workload, *profile_files(options.profile), options.price, *clusters)
    check_distinct((options.out, options.report), inputs)
    set_threads(options.threads)
    if options.latency_bound is None and options.ttft is None and options.tpot is None:
        raise InputError("No bound is given: pass --latency-bound 5s (inf: none), --ttft 200ms or --tpot 20ms.")
    bounds_s = tuple(parse_duration(part) for part in (options.latency_bound or "inf").split(","))
    search = _search_options(options)
    check_choice(options.arrivals, PATTERNS, "--arrivals")
    check_columns(options.columns, options.workload, scale=options.scale_to_context)
    prices = read_prices(options.price) if options.price else None
    _check_combination(len(bounds_s), len(clusters), options.open_system, prices is not None)
    settings = tuple(_setting(options, cluster) for cluster in clusters)
    problem = TuneProblem(
        settings,
        bounds_s,
        search,
        rate_seq_s=parse_rate(options.rate) if options.rate else None,
        arrivals=options.arrivals,
        seed=options.seed,
        prefix_caching=options.prefix_caching,
        prices=prices,
        advice=options.advice,
        explain=options.explain,
        target=_target(options, settings[0], search.policies),
        engine=options.engine,
        out=options.out,
        report=options.report,
    )
    answer = rated.answer if options.open_system else bounded.answer
    return answer(problem, options.json)


def _setting(options: TuneOptions, cluster: str | None) -> "Setting":
    """Return the setting on one of the clusters."""
    from xscheduler.settings import find_setting

    return find_setting(
        options.model,
        cluster,
        options.workload,
        only_profile(options.profile),
        dtype=options.dtype,
        kv_dtype=options.kv_dtype,
        memory_fraction=options.memory_fraction,
        columns=options.columns,
        scale_to_context=options.scale_to_context,
        rate=options.rate,
        device=options.device,
        engine=options.engine,
        front_end=options.front_end,
    )


def _search_options(options: TuneOptions) -> "SearchOptions":
    """Return the search's options; InputError for an unknown choice."""
    from exegpt.api.tuning import RULES, SEARCH_METHODS
    from xcore.choices import bound_meaning, check_choice, with_prefixes
    from xcore.duration import parse_duration
    from xscheduler.policy_names import policy_names
    from xscheduler.setting_search import SearchOptions

    method = check_choice(options.search, SEARCH_METHODS, "--search")
    rules = RULES[check_choice(options.admission, tuple(RULES), "--admission")]
    ttft_s, tpot_s = (parse_duration(text) if text else None for text in (options.ttft, options.tpot))
    policies = policy_names(options.policy)
    if options.prefix_caching:
        if not options.open_system:
            raise InputError("--prefix-caching is for requests that arrive over time: add --rate, like --rate 5/s.")
        policies = with_prefixes(policies, options.policy)
    meaning = bound_meaning(options.bound, options.percentile)
    return SearchOptions(meaning, ttft_s, tpot_s, policies, method, options.tolerance, rules, options.fixed)


def _target(options: TuneOptions, setting: "Setting", policies: tuple[str, ...]) -> "Target | None":
    """Return the engine whose flags the user wants; InputError if it is unknown or can't run the model."""
    from xcore.choices import check_choice
    from xscheduler.export import ENGINES, Target

    if options.export is None:
        return None
    engine = options.export.lower()
    check_choice(engine, ENGINES, "--export")
    target = Target(engine, options.model if options.model and Path(options.model).is_dir() else None)
    target.check(setting, policies)
    return target


def _check_combination(bounds: int, clusters: int, open_system: bool, priced: bool) -> None:
    """Raise InputError for options that can't be combined."""
    if clusters > 1 and not open_system:
        raise InputError("Several clusters are compared at an arrival rate: add --rate, like --rate 5/s.")
    if priced and not open_system:
        raise InputError("Prices are compared at an arrival rate: add --rate, like --rate 5/s.")
    if open_system and bounds > 1:
        raise InputError("An arrival rate needs a single latency bound: name one, or omit --rate for the frontier.")
