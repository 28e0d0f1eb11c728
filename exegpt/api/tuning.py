"""`tune`: search under each latency bound, or at an arrival rate on each cluster, and write the output files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from exegpt.api.agent_turns import check_agent_search
from exegpt.api.prefill_decode_offer import PrefillDecodeOffer, check_disaggregated, prefill_decode_offer
from exegpt.api.reports import write_search_report
from exegpt.api.tune_settings import caching_option, check_devices, drafts_of, setting_on, settings_of_kinds, target_of
from exegpt.options.tune import TuneOptions
from exegpt.options.values import profile_files
from xcore import document
from xcore.choices import bound_meaning, check_choice, check_columns, check_prefix_caching, with_prefixes
from xcore.console import output
from xcore.duration import parse_duration
from xcore.errors import InputError
from xcore.files import check_distinct, check_output
from xcore.policies import TRAITS, runs
from xcore.processes import WORTH, Processes
from xcore.quantity import figure_text
from xcore.specs.engine_spec import engine_of
from xcore.specs.load_curve import LoadHour, read_load_curve
from xcore.specs.price import Prices, TokenPrice, price_per_hour, read_prices, token_price
from xcore.specs.schedule import Schedule
from xcore.specs.workload import Workload
from xcore.traces.trace import parse_rate
from xscheduler.drafts import DraftGain, Drafts, draft_gain, search_drafts
from xscheduler.engine_settings import resident
from xscheduler.expert_divisions import divided_as
from xscheduler.export import Export, Target
from xscheduler.policy_names import policy_names
from xscheduler.rate_sample import arrivals_of
from xscheduler.setting_search import SearchOptions, advise, best_on, search_schedule
from xscheduler.settings import Setting

if TYPE_CHECKING:
    from xcore.batching.admission import Admission
    from xscheduler.goodput import RateBounds
    from xscheduler.hourly_replicas import HourlyReplicas
    from xscheduler.open_tune import Rated
    from xscheduler.rate_sample import Arrivals
    from xscheduler.search import Method
    from xscheduler.tuned import Alternative, Tuned

SEARCH_METHODS: "tuple[Method, ...]" = ("bnb", "exhaustive", "optuna")
"""The methods of a search."""
RULES: "dict[str, tuple[Admission, ...]]" = {"reserve": ("reserve",), "grow": ("grow",), "auto": ("reserve", "grow")}
"""The rules of admission that a search tries, by the value of --admission."""
PATTERNS = ("poisson", "trace")
"""The patterns in which requests arrive."""


@dataclass(frozen=True)
class TuneProblem:
    """A search problem of `exegpt tune`, and its output files."""

    settings: tuple[Setting, ...]
    """One setting per cluster."""
    bounds_s: tuple[float | None, ...]
    search: SearchOptions
    options: TuneOptions = field(default_factory=TuneOptions)
    rates_seq_s: tuple[float, ...] = ()
    """The arrival rates; empty with pattern `trace`: the trace's own."""
    curve: tuple[LoadHour, ...] = ()
    """The rates of a day, of which the highest is the arrival rate."""
    prices: Prices | None = None
    target: Target | None = None
    """The engine whose launch command is also printed."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """With --devices: why a kind has no setting."""
    drafts: Drafts | None = None
    """The numbers of draft tokens to try; None: no speculative decoding."""

    @property
    def open_system(self) -> bool:
        """Whether requests arrive over time."""
        return bool(self.rates_seq_s) or self.options.arrivals == "trace"


@dataclass(frozen=True)
class BoundedAnswer:
    """The answer under one bound in seconds; None: unbounded."""

    bound_s: float | None
    tuned: "Tuned"
    advice: tuple[str, ...]
    export: Export | None = None
    price_hour: float | None = None
    """The price of the cluster for an hour; None without prices."""
    drafting: DraftGain | None = None
    """The gain of drafting on the best schedule's stages; None if nothing may be drafted, or without a schedule."""

    def token_price(self, setting: Setting) -> TokenPrice | None:
        """Return the price of a million tokens at full throughput; None without prices or without a schedule."""
        if self.price_hour is None or self.tuned.estimate is None:
            return None
        return token_price(self.price_hour, self.tuned.estimate.throughput_seq_s, setting.workload)


@dataclass(frozen=True)
class ClusterOffer:
    """A cluster's best answer at the rate, and the price of the cluster."""

    setting: Setting
    rated: "Rated"
    price_hour: float | None
    export: Export | None = None
    prefill_decode: PrefillDecodeOffer | None = None
    """The best layout of prefill and decode replicas; None if it wasn't asked for."""
    drafting: DraftGain | None = None
    """The gain of drafting on the best schedule's stages; None if nothing may be drafted, or without a schedule."""

    @property
    def feasible(self) -> bool:
        """Whether a schedule sustains the rate."""
        return self.rated.tuned.schedule is not None

    @property
    def token_price(self) -> TokenPrice | None:
        """The price of a million tokens at the rate; None without prices or without a schedule."""
        if self.price_hour is None or not self.feasible:
            return None
        return token_price(self.price_hour, self.rated.rate_seq_s, self.setting.workload)

    @property
    def order(self) -> tuple[object, ...]:
        """The sort key: clusters that sustain the rate first, then the cheapest, or without prices the smallest."""
        devices = self.setting.cluster.devices
        return (not self.feasible, devices if self.price_hour is None else self.price_hour, devices)


def read_problem(
    options: TuneOptions, workload: Workload | None = None, fixed: Mapping[str, int] | None = None
) -> TuneProblem:
    """Return the search problem that the options describe; InputError for options that contradict each other.

    Args:
        options: The command's options.
        workload: The workload, instead of the options'.
        fixed: Control variables with fixed values, in addition to the options'.
    """
    check_agent_search(options)
    check_output(options.out)
    check_output(options.report)
    check_output(options.export_out)
    clusters: list[str | None] = [None]
    if options.cluster:
        clusters = [part.strip() for part in options.cluster.split(",")]
    inputs = (options.workload, *profile_files(options.profile), options.price, options.load_curve, *clusters)
    check_distinct((options.out, options.report, options.export_out), inputs)
    if all(bound is None for bound in (options.latency_bound, options.ttft, options.tpot, options.agents)):
        raise InputError("No bound is given: pass --latency-bound 5s (inf: none), --ttft 200ms or --tpot 20ms.")
    bounds_s = tuple(parse_duration(part) for part in (options.latency_bound or "inf").split(","))
    search = _search_options(options, options.fixed | dict(fixed or {}))
    check_choice(options.arrivals, PATTERNS, "--arrivals")
    if workload is None:
        check_columns(options.columns, options.workload, scale=options.scale_to_context)
    prices = read_prices(options.price) if options.price else None
    if len(clusters) > 1 and not options.open_system:
        raise InputError("Several clusters are compared at an arrival rate: add --rate, like --rate 5/s.")
    check_devices(options)
    drafts = drafts_of(options)
    left_out: dict[str, str] = {}
    if options.devices:
        settings, left_out = settings_of_kinds(options, workload, prices)
        search = replace(search, policies=_policies_of_engine(options, settings[0], search.policies))
    else:
        settings = tuple(setting_on(options, cluster, workload) for cluster in clusters)
    check_disaggregated(options, settings)
    target = target_of(options, settings[0], search.policies)
    curve = _load_curve(options, len(bounds_s))
    rates_seq_s = tuple(parse_rate(part) for part in options.rate.split(",")) if options.rate else ()
    if curve:
        rates_seq_s = (max(hour.rate_seq_s for hour in curve),)
    return TuneProblem(settings, bounds_s, search, options, rates_seq_s, curve, prices, target, left_out, drafts)


def _load_curve(options: TuneOptions, bounds: int) -> tuple[LoadHour, ...]:
    """Return the rates of a day; InputError for a bad file, or with a rate or several bounds."""
    if options.load_curve is None:
        return ()
    if options.rate:
        raise InputError(f"--load-curve has the rates: leave --rate {options.rate} out.")
    if bounds > 1:
        raise InputError("--load-curve needs a single latency bound: pass one.")
    return read_load_curve(options.load_curve)


def _policies_of_engine(options: TuneOptions, setting: Setting, policies: tuple[str, ...]) -> tuple[str, ...]:
    """Return the policies that the engine runs, unless the user names some."""
    engine = engine_of(setting.profile).name
    return policies if options.policy else tuple(policy for policy in policies if runs(engine, policy))


def _search_options(options: TuneOptions, fixed: dict[str, int]) -> SearchOptions:
    """Return the search's options; InputError for an unknown choice."""
    method = check_choice(options.search, SEARCH_METHODS, "--search")
    rules = RULES[check_choice(options.admission, tuple(RULES), "--admission")]
    ttft_s, tpot_s = (parse_duration(text) if text else None for text in (options.ttft, options.tpot))
    policies = policy_names(options.policy)
    uncompiled = [name for name in policies if TRAITS[name].compiled is None]
    if (options.open_system or options.agents) and uncompiled:
        which = "--agents" if options.agents else "--rate"
        raise InputError(
            f"{which} needs policies with a compiled replay, and '{uncompiled[0]}' has none: leave it out of --policy, "
            f"or replay its schedule with `exegpt simulate {which}`."
        )
    if options.prefix_caching and not (options.open_system or options.agents or options.prefix_hit):
        raise InputError(
            "--prefix-caching is for requests that arrive over time: add --rate, like --rate 5/s, or --agents 200, or "
            "pass the share of the prompts that is found, like --prefix-hit 0.6."
        )
    if options.caches_prefixes:
        policies = with_prefixes(policies, options.policy, caching_option(options))
    meaning = bound_meaning(options.bound, options.percentile)
    return SearchOptions(meaning, ttft_s, tpot_s, policies, method, options.tolerance, rules, fixed)


def tune_bounds(problem: TuneProblem) -> tuple[BoundedAnswer, ...]:
    """Return the answer under each bound if requests always wait; write the last schedule found, and the report."""
    setting, bounds_s = problem.settings[0], problem.bounds_s
    if problem.options.prefix_hit:
        check_prefix_caching(None, setting.model, caching_option(problem.options))
    if problem.prices:
        price_per_hour(problem.prices, setting.cluster)  # report a missing price before the work
    with output.progress("searching policies") as progress:
        tuned = [_searched(problem, bound_s, progress) for bound_s in bounds_s]
    advice = (
        problem.options.advice
        if problem.options.advice is not None
        else len(bounds_s) == 1 and setting.cluster.devices <= 8
    )
    answers = tuple(_bounded(problem, answer, bound_s, advice) for answer, bound_s in zip(tuned, bounds_s, strict=True))
    schedules = [schedule for answer in reversed(answers) if (schedule := written(problem, answer.tuned))]
    exports = [answer.export for answer in reversed(answers) if answer.export]
    _write_export(problem, exports[0] if exports else None)
    best = schedules[0] if schedules else None
    reported = replace(setting, speculation=best.speculation) if best else setting
    _write(problem, reported, best, tuned, answers[-1].advice)
    return answers


def _searched(problem: TuneProblem, bound_s: float | None, progress: Callable[[int, int], None]) -> "Tuned":
    setting, search, drafts = problem.settings[0], problem.search, problem.drafts
    if drafts is None:
        return search_schedule(setting, bound_s, progress=progress, **vars(search))
    return search_drafts(setting, bound_s, drafts, search, progress=progress)


def _on_engine(problem: TuneProblem, tuned: "Tuned", bound_s: float | None) -> "Alternative | None":
    """Return the best schedule that the setting's engine runs, with the number of draft tokens that is best for it."""
    setting, drafts = problem.settings[0], problem.drafts
    engine = engine_of(setting.profile).name
    policies = tuple(policy for policy in problem.search.policies if runs(engine, policy))
    only = policies in ((), problem.search.policies)
    if drafts is None or len(drafts.lengths) == 1 or setting.own is None or only:
        return best_on(tuned, engine)
    return best_on(search_drafts(setting, bound_s, drafts, replace(problem.search, policies=policies)), engine)


def drafting(problem: TuneProblem, schedule: Schedule | None) -> DraftGain | None:
    """Return the gain of drafting on a schedule's stages; None without a schedule, or if nothing may be drafted."""
    if schedule is None or problem.drafts is None:
        return None
    setting = divided_as(problem.settings[0], schedule)
    return draft_gain(schedule, setting.on(schedule.policy).profile, problem.drafts)


def _bounded(problem: TuneProblem, tuned: "Tuned", bound_s: float | None, advice: bool) -> BoundedAnswer:
    """Return the answer under one bound, with the export to the target engine."""
    import xsimulator

    setting, search = problem.settings[0], problem.search
    on_engine, export = _on_engine(problem, tuned, bound_s), None
    tuned = replace(tuned, best_on_engine=on_engine)
    best = on_engine if problem.options.engine and on_engine else None
    advised = replace(tuned, schedule=best.schedule, estimate=best.estimate) if best else tuned
    if problem.target and on_engine and on_engine.schedule:
        profile = divided_as(setting, on_engine.schedule).profile
        followed = problem.target.follows(on_engine.schedule, profile)
        running, _ = resident(followed, profile)
        estimate = xsimulator.estimate(running, profile)
        export = problem.target.export(followed, estimate, alike=bool(setting.workload.prefix_hit))
    if advised.schedule:
        setting = replace(setting, speculation=advised.schedule.speculation)
    texts = tuple(advise(setting, advised, bound_s, search)) if advice else ()
    price_hour = price_per_hour(problem.prices, setting.cluster) if problem.prices else None
    return BoundedAnswer(bound_s, tuned, texts, export, price_hour, drafting(problem, written(problem, tuned)))


def written(problem: TuneProblem, tuned: "Tuned") -> Schedule | None:
    """Return the schedule for the file: the best of all, or the best on the engine that the user chose."""
    return tuned.best_on_engine.schedule if problem.options.engine and tuned.best_on_engine else tuned.schedule


@dataclass(frozen=True)
class RateAnswer:
    """The answers under one bound in seconds (None: unbounded) at one rate, the best cluster first."""

    bound_s: float | None
    rate_seq_s: float
    offers: list[ClusterOffer]


def tune_rate(problem: TuneProblem) -> list[ClusterOffer]:
    """Return each cluster's best answer at the first rate within the first bound, the best offer first."""
    return tune_rates(problem)[0].offers


def tune_rates(problem: TuneProblem) -> list[RateAnswer]:
    """Return the answers under each bound, at each rate; write the last schedule found, and the report.

    All rates share a search, and all searches the requests.
    """
    from xscheduler.goodput import RateBounds

    search, prices = problem.search, problem.prices
    if search.tolerance:
        raise InputError(f"--tolerance cannot be combined with --rate: leave --tolerance {search.tolerance} out.")
    for setting in problem.settings:
        if problem.options.caches_prefixes:
            check_prefix_caching(None, setting.model, caching_option(problem.options))
        if prices is not None:
            price_per_hour(prices, setting.cluster)  # report a missing price before the work
    rates = arrival_rates(problem)
    asked = [
        (setting, arrivals_of(setting, problem.options.arrivals, problem.options.seed)) for setting in problem.settings
    ]
    bounds = [RateBounds(bound_s, search.ttft_s, search.tpot_s) for bound_s in problem.bounds_s]
    answers = []
    for within, on_clusters in zip(bounds, _rated(asked, bounds, rates, problem), strict=True):
        for place, rate_seq_s in enumerate(rates):
            offers = [
                _offer(problem, setting, arrivals, within, at_rates[place])
                for (setting, arrivals), at_rates in zip(asked, on_clusters, strict=True)
            ]
            answers.append(RateAnswer(within.latency_s, rate_seq_s, sorted(offers, key=lambda offer: offer.order)))
    bests = [answer.offers[0] for answer in answers]
    last = next((best for best in reversed(bests) if best.feasible), bests[-1])
    _write_export(problem, last.export)
    asked_setting = next(setting for setting in problem.settings if setting.cluster == last.setting.cluster)
    reported = replace(asked_setting, speculation=last.setting.speculation)
    _write(problem, reported, written(problem, last.rated.tuned), [last.rated.tuned])
    return answers


def _offer(
    problem: TuneProblem, setting: Setting, arrivals: "Arrivals", bounds: "RateBounds", rated: "Rated"
) -> ClusterOffer:
    """Return a cluster's answer with its price, and with the export to the target engine."""
    price = None if problem.prices is None else price_per_hour(problem.prices, setting.cluster)
    if any_schedule := next((best.schedule for best in rated.sustained.values()), None):
        setting = replace(setting, speculation=any_schedule.speculation)
    on_engine = best_on(rated.tuned, engine_of(setting.profile).name, rated.goodput)
    rated = replace(rated, tuned=replace(rated.tuned, best_on_engine=on_engine))
    export = _exported_at(problem, setting, on_engine, arrivals, bounds, rated.rate_seq_s)
    split = prefill_decode_offer(problem, setting, arrivals, bounds, rated.rate_seq_s)
    divided = divided_as(setting, rated.tuned.schedule)
    return ClusterOffer(divided, rated, price, export, split, drafting(problem, written(problem, rated.tuned)))


def _exported_at(
    problem: TuneProblem,
    setting: Setting,
    on_engine: "Alternative | None",
    arrivals: "Arrivals",
    bounds: "RateBounds",
    rate_seq_s: float,
) -> Export | None:
    """Return the target's launch command, and a replay of the target's schedule at the rate."""
    from xscheduler.goodput import Meter

    if problem.target is None or on_engine is None or on_engine.schedule is None or on_engine.estimate is None:
        return None
    profile = divided_as(setting, on_engine.schedule).profile
    followed = problem.target.follows(on_engine.schedule, profile)
    replayed = replace(
        followed, prefix_caching=problem.options.caches_prefixes
    )  # without it, no prompts share prefixes
    served = Meter(profile, arrivals, bounds).served_at(replayed, rate_seq_s)
    estimate = replace(
        on_engine.estimate,
        **{name: value for name, value in vars(served).items() if value not in (None, ())},
        kv_blocks=followed.kv_blocks,
        kv_tokens=followed.kv_blocks * followed.block_size,
    )
    return problem.target.export(followed, estimate, alike=problem.options.caches_prefixes and bool(arrivals.prefixes))


def _write(
    problem: TuneProblem,
    setting: Setting,
    schedule: Schedule | None,
    answers: "list[Tuned]",
    advice: tuple[str, ...] = (),
) -> None:
    if problem.options.out and schedule:
        document.write(problem.options.out, schedule)
    if problem.options.report:
        write_search_report(problem.options.report, setting, answers, problem.bounds_s, problem.search, advice)


def _write_export(problem: TuneProblem, export: Export | None) -> None:
    """Write the commands or the file that start the target's engine, if the user names a file for them."""
    if problem.options.export_out and export:
        document.write_text(problem.options.export_out, f"{export.text.rstrip()}\n")


def arrival_rates(problem: TuneProblem) -> tuple[float, ...]:
    """Return the requests/s of the problem, or of its trace."""
    workload = problem.settings[0].workload
    if problem.rates_seq_s:
        return problem.rates_seq_s
    if workload.arrival_rate is None:
        raise InputError(
            f"Workload {workload.name} has no arrivals: pass a trace with an arrival column, or a rate with --rate."
        )
    return (workload.arrival_rate,)


def _rated(
    asked: "list[tuple[Setting, Arrivals]]",
    bounds: "list[RateBounds]",
    rates: tuple[float, ...],
    problem: TuneProblem,
) -> "list[list[list[Rated]]]":
    """Return the best answers: for all bounds, for all clusters, one at each rate.

    Many searches run in several processes, those with the most devices first.
    """
    from xscheduler.setting_at_rates import search_at_rates

    how = rates, problem.search, problem.options.caches_prefixes, problem.drafts
    searches = [(setting, arrivals, within) for within in bounds for setting, arrivals in asked]
    at = f"at {', '.join(f'{figure_text(rate, 6)}/s' for rate in rates)}"
    if len(searches) < WORTH:
        answers = []
        for setting, arrivals, within in searches:
            with output.progress(f"{setting.cluster.name} {at}") as progress:
                answers.append(search_at_rates(setting, arrivals, within, *how, progress=progress))
    else:
        order = sorted(range(len(searches)), key=lambda place: -searches[place][0].cluster.devices)
        with Processes() as processes, output.progress(f"{len(searches)} searches {at}") as progress:
            ordered = processes.each(search_at_rates, [(*searches[place], *how) for place in order], progress)
        by_place = dict(zip(order, ordered, strict=True))
        answers = [by_place[place] for place in range(len(searches))]
    return [answers[first : first + len(asked)] for first in range(0, len(answers), len(asked))]


def hours_of(problem: TuneProblem, offer: ClusterOffer) -> "HourlyReplicas | None":
    """Return the replicas of an offer's schedule in each hour; None without a load curve or a schedule."""
    from xscheduler.goodput import Meter, RateBounds
    from xscheduler.hourly_replicas import hourly_replicas

    schedule, search = offer.rated.tuned.schedule, problem.search
    if schedule is None or not problem.curve:
        return None
    arrivals = arrivals_of(offer.setting, problem.options.arrivals, problem.options.seed)
    bounds = RateBounds(problem.bounds_s[0], search.ttft_s, search.tpot_s)
    meter = Meter(divided_as(offer.setting, schedule).on(schedule.policy).profile, arrivals, bounds)
    goodput_seq_s = offer.rated.sustained[schedule.policy].goodput_seq_s
    with output.progress("replicas by the hour") as progress:
        return hourly_replicas(meter, schedule, goodput_seq_s, problem.curve, progress)


def headroom(rated: "Rated") -> list[str]:
    """Return sentences on the ratio of goodput to rate, and on how full and busy the devices are at the rate."""
    from xscheduler.advice import use_of

    schedule, estimate = rated.tuned.schedule, rated.tuned.estimate
    if schedule is None or estimate is None:
        return []
    goodput = rated.sustained[schedule.policy].goodput
    sure = f" to {figure_text(goodput.high)}/s" if goodput.high > goodput.low else ""
    times = figure_text(goodput.low / rated.rate_seq_s)
    return [
        f"headroom: the goodput of {figure_text(goodput.low)}/s{sure} is at least {times} times the rate",
        use_of((schedule, estimate)),
    ]
