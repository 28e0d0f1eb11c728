"""`exegpt tune`: the schedule with the highest throughput under a latency bound."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exegpt.cli import options
from xcore.errors import InputError

if TYPE_CHECKING:
    from xcore.batching.admission import Admission
    from xscheduler.export import Target
    from xscheduler.setting_search import SearchOptions
    from xscheduler.settings import Setting

LATENCY_BOUNDS = Annotated[
    str | None,
    typer.Option(
        "--latency-bound",
        "-l",
        help=options.LATENCY_BOUND_HELP
        + " Several bounds, separated by commas, give the frontier. Default with --ttft or --tpot: inf.",
    ),
]
TTFT = Annotated[str | None, typer.Option(help="Bound on the time to first token, for --percentile of the requests.")]
TPOT = Annotated[str | None, typer.Option(help="Bound on the time per output token, for --percentile of the requests.")]
SEARCH = Annotated[str, typer.Option(help="bnb (branch and bound), exhaustive or optuna")]
TOLERANCE = Annotated[float, typer.Option(min=0.0, max=1.0, help="Share by which monotonicity may be violated.")]
ADMISSION = Annotated[
    str,
    typer.Option(
        help="reserve: a request waits until KV blocks for its maximum length are free; grow: it gets blocks as it "
        "needs them, and the request admitted last is preempted when none are left; auto: the better of both."
    ),
]
PREFIX_CACHING = Annotated[
    bool,
    typer.Option(
        "--prefix-caching",
        help="With --rate: reuse KV blocks of prompts that begin alike, as the trace's columns say (hash_ids, "
        "prompt_ids, prefix_id with prefix_tokens, session_id, conversation_id, chat_id); orca and chunked.",
    ),
]
ARRIVALS = Annotated[
    str, typer.Option(help="Arrivals: poisson (at --rate), or trace (its own times, scaled to --rate if given).")
]
PRICE = Annotated[
    Path | None, typer.Option(help="YAML: device kind → price per device-hour. The cheapest cluster is the answer.")
]
ADVICE = Annotated[
    bool | None,
    typer.Option(
        "--advice/--no-advice",
        help="Predict the effect of a looser bound and of other clusters. Default: with one bound, up to eight "
        "devices.",
    ),
]
EXPLAIN = Annotated[
    bool,
    typer.Option(
        "--explain", help="Print all reasons for each policy's rank, and what limits it. Default: the main reason."
    ),
]
OUT = Annotated[
    Path | None,
    typer.Option(
        "--out", "-o", help="Write the schedule to this file; with several bounds, that of the last feasible one."
    ),
]
EXPORT = Annotated[
    str | None, typer.Option(help="Print the launch command of the best schedule that an engine runs: vllm.")
]
_SETTING = (
    *("dtype", "kv_dtype", "memory_fraction", "columns", "scale_to_context", "rate", "device", "engine", "front_end"),
)
"""Options that `find_setting` takes by their names."""


def tune(
    latency_bound: LATENCY_BOUNDS = None,
    model: options.MODEL = None,
    cluster: options.CLUSTER = None,
    workload: options.WORKLOAD = None,
    profile: options.PROFILES = None,
    bound: options.BOUND = "requests",
    percentile: options.PERCENTILE = 99.0,
    ttft: TTFT = None,
    tpot: TPOT = None,
    policy: options.POLICY = None,
    encode_batch: options.ENCODE_BATCH = None,
    decode_iterations: options.DECODE_ITERATIONS = None,
    micro_batches: options.MICRO_BATCHES = None,
    encode_micro_batches: options.ENCODE_MICRO_BATCHES = None,
    max_num_seqs: options.MAX_NUM_SEQS = None,
    max_num_batched_tokens: options.MAX_NUM_BATCHED_TOKENS = None,
    prefills_per_step: options.PREFILLS_PER_STEP = None,
    tp_degree: options.TP_DEGREE = None,
    tp_gpus: options.TP_GPUS = None,
    encode_devices: options.ENCODE_DEVICES = None,
    encode_tp_degree: options.ENCODE_TP_DEGREE = None,
    replicas: options.REPLICAS = None,
    search: SEARCH = "bnb",
    tolerance: TOLERANCE = 0.0,
    admission: ADMISSION = "reserve",
    prefix_caching: PREFIX_CACHING = False,
    dtype: options.DTYPE = None,
    kv_dtype: options.KV_DTYPE = None,
    memory_fraction: options.MEMORY_FRACTION = None,
    columns: options.COLUMNS = None,
    scale_to_context: options.SCALE_TO_CONTEXT = False,
    device: options.DEVICE = None,
    engine: options.ENGINE = None,
    front_end: options.FRONT_END = None,
    threads: options.THREADS = None,
    rate: options.RATE = None,
    arrivals: ARRIVALS = "poisson",
    price: PRICE = None,
    seed: options.SEED = 0,
    advice: ADVICE = None,
    explain: EXPLAIN = False,
    out: OUT = None,
    export: EXPORT = None,
    report: options.REPORT = None,
    plugin: options.PLUGIN = None,
    json: options.JSON = False,
) -> int:
    """Find the schedule with the highest throughput under a latency bound.

    Example: exegpt tune --latency-bound 5s --model llama-3.1-8b --cluster 1xH100-SXM --workload 2048/256

    With --rate, requests arrive over time and latency counts from arrival. With several clusters, separated by commas,
    and --price, the answer is the cheapest cluster that sustains the rate.

    Control variables that are given are fixed, and policies without one are left out.

    Example: exegpt tune --ttft 1s --model llama-3.1-8b --cluster 1xH100-SXM --max-num-seqs 64

    Example: exegpt tune --latency-bound 5s --rate 20/s --cluster 2xA40,4xA40,1xH100-SXM --price prices.yaml

    Example: exegpt tune --ttft 1s --rate 5/s --workload trace.jsonl --admission grow --prefix-caching
    """
    typed = dict(locals())
    from exegpt.api.tuning import PATTERNS, TuneOptions
    from exegpt.cli import bounded, rated
    from xcore.choices import check_choice, check_columns
    from xcore.duration import parse_duration
    from xcore.files import check_distinct, check_output
    from xcore.specs.price import read_prices
    from xcore.traces.trace import parse_rate
    from xrunner.threads import set_threads
    from xscheduler.settings import find_setting

    check_output(out)
    check_output(report)
    clusters = [part.strip() for part in cluster.split(",")] if cluster else [None]
    check_distinct((out, report), (workload, *options.profile_files(profile), price, *clusters))
    set_threads(threads)
    if latency_bound is None and ttft is None and tpot is None:
        raise InputError("No bound is given: pass --latency-bound 5s (inf: none), --ttft 200ms or --tpot 20ms.")
    bounds_s = tuple(parse_duration(part) for part in (latency_bound or "inf").split(","))
    search_options = _search_options(typed)
    check_choice(arrivals, PATTERNS, "--arrivals")
    check_columns(columns, workload, scale=scale_to_context)
    prices = read_prices(price) if price else None
    _check_combination(len(bounds_s), len(clusters), rate is not None or arrivals == "trace", prices is not None)
    how = {name: typed[name] for name in _SETTING} | {"profile": options.only_profile(profile)}
    settings = tuple(find_setting(model, where, workload, **how) for where in clusters)
    target = _target(export, settings[0], model, search_options.policies)
    rate_seq_s = parse_rate(rate) if rate else None
    tune_options = options.build(TuneOptions, locals() | {"search": search_options})
    answer = rated.answer if tune_options.open_system else bounded.answer
    return answer(tune_options, json)


def _search_options(typed: dict[str, Any]) -> "SearchOptions":
    """Return the search's options; InputError for an unknown choice."""
    from xcore.choices import bound_meaning, check_choice, with_prefixes
    from xcore.duration import parse_duration
    from xscheduler.policy_names import policy_names
    from xscheduler.setting_search import SearchOptions

    meaning = bound_meaning(typed["bound"], typed["percentile"])
    search, admission = typed["search"], typed["admission"]
    check_choice(search, ("bnb", "exhaustive", "optuna"), "--search")
    check_choice(admission, ("reserve", "grow", "auto"), "--admission")
    ttft_s, tpot_s = (parse_duration(text) if text else None for text in (typed["ttft"], typed["tpot"]))
    policies = policy_names(typed["policy"])
    if typed["prefix_caching"]:
        if typed["rate"] is None and typed["arrivals"] != "trace":
            raise InputError("--prefix-caching is for requests that arrive over time: add --rate, like --rate 5/s.")
        policies = with_prefixes(policies, typed["policy"])
    rules: tuple[Admission, ...] = ("reserve", "grow") if admission == "auto" else (admission,)
    return SearchOptions(meaning, ttft_s, tpot_s, policies, search, typed["tolerance"], rules, options.fixed(typed))


def _target(engine: str | None, setting: "Setting", typed: str | None, policies: tuple[str, ...]) -> "Target | None":
    """Return the engine whose flags the user wants; InputError if it is unknown or can't run the model."""
    from xcore.choices import check_choice
    from xscheduler.export import ENGINES, Target

    if engine is None:
        return None
    engine = engine.lower()
    check_choice(engine, ENGINES, "--export")
    target = Target(engine, typed if typed and Path(typed).is_dir() else None)
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
