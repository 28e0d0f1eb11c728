"""Hermes' evaluation on one A100 with LLaMA-2-7B: applications ordered and prewarmed by their demand graphs.

The engine's two rates are those of Hermes' repository, and the same for every batch. The cache has the memory that
weights of 13.5 GB leave in 90 % of 40 GB. No figure here is fitted to the paper's.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TypeVar

import numpy as np

from exegpt.reproduction.hermes_arrivals import find_traces
from exegpt.reproduction.hermes_policy_time import MINUTES, PolicyTime, policy_times
from exegpt.reproduction.hermes_scale import APPLICATIONS as APPLICATIONS_OF_SCALE
from exegpt.reproduction.hermes_scale import (
    QUANTILES,
    QUICK_APPLICATIONS,
    QUICK_LOADS,
    ScaleResult,
    scale,
)
from exegpt.reproduction.hermes_sensitivity import (
    BUCKETS,
    SPREADS,
    Bucketing,
    LargerModel,
    RealArrivals,
    Spread,
    bucketings,
    larger_model,
    real_arrivals,
    spreads,
)
from exegpt.reproduction.hermes_setting import (
    APPLICATIONS,
    ENGINES,
    LIMITS,
    LOADS,
    RATES,
    Models,
    ablated,
    completion_seconds,
)
from exegpt.reproduction.hermes_workload import MIX, draw_submissions, find_graphs, learn_graphs
from xcore.applications.demand import ApplicationDemand, Seen
from xcore.applications.demand_graph import DemandGraph
from xcore.applications.prewarming import expected_effect
from xcore.arrays import Array
from xcore.orders.gittins import RankedDemand
from xmulti.applications.application_progress import DemandEstimates
from xmulti.applications.llm_backend import LLMLimits
from xmulti.applications.orders import (
    ApplicationOrder,
    ApplicationSlack,
    ByApplication,
    ByRequest,
    EarliestDeadline,
    VirtualTokens,
    application_gittins,
)
from xmulti.applications.simulation import Prewarming, simulate
from xmulti.applications.submission import Submission
from xmulti.applications.warm_cache import POLICIES, WarmCache

STANDS_ON = (
    "Simulated: one LLM at 0.1 ms per prompt token and 60 ms per decoding iteration, 42,900 tokens of KV; nothing here "
    "was run on a GPU."
)
PAPER = {"vLLM": (-0.770, -0.824), "Parrot": (-0.767, -0.690), "VTC": (-0.667, -0.741)}
"""Hermes' change of the mean and 95th-percentile completion time against each baseline at 1x, LLaMA-2-7B."""
PAPER_ABLATIONS = {"no refinement": 0.153, "nor Gittins": 0.475}
"""Mean completion time over Hermes' at 3x; the oracle's is less than 10 % below."""
FACTORS = (1.2, 1.5, 2.0)
"""Deadlines as multiples of the time alone."""
CONTEXT_GB, ADAPTER_SLOTS, ACTIVE_ADAPTERS = (8, 16, 32), (10, 20), 10
"""Sizes of the LLM's caches: GB of contexts, adapters in the cache, and adapters in use.

The numbers of adapters are vLLM's max-cpu-loras and max-loras. The paper has a max-cpu-loras of 20; with 10, only the
adapters in use are kept.
"""
CONTEXT_RATE = 2e9
"""Bytes/s at which a context is loaded from a disk."""
ADAPTER_S = 0.5
"""Seconds to load an adapter."""
KNOBS = tuple(k / 10 for k in range(1, 10))
CONTAINERS = {"code_feedback": ("code_generation", "docker", 2.2), "hugginggpt": ("task_planning", "dnn", 7.0)}
"""An application's unit whose successor uses the backend, and that backend's start-up time in seconds."""
SEEDS = tuple(range(5))
QUICK = (
    f"one seed of {len(SEEDS)}, two spreads of runs and two numbers of buckets of five, the smallest cache of each "
    f"kind, two rates of {len(MINUTES)} for the policy's time, and {QUICK_APPLICATIONS} of {APPLICATIONS_OF_SCALE:,} "
    "applications on two 70B, at 3x"
)
"""What `quick` leaves out."""

Part = TypeVar("Part")


@dataclass(frozen=True)
class OrderResult:
    """One order under one load: seconds from arrival to end over all seeds."""

    engine: str
    load: str
    order: str
    mean_s: float
    p95_s: float
    over_alone: float
    """Mean completion time over the mean of running alone."""
    mean_reduction: float
    """Relative change by Hermes: -0.5 is half."""
    p95_reduction: float
    quantiles_s: tuple[float, ...]
    """At `QUANTILES`."""


@dataclass(frozen=True)
class InTime:
    """Shares of deadlines kept at 2x."""

    engine: str
    order: str
    all: float
    by_factor: tuple[float, ...]


@dataclass(frozen=True)
class Ablation:
    """Mean completion time at 3x."""

    engine: str
    name: str
    mean_s: float
    over_hermes: float
    """0.1 means a tenth longer."""


@dataclass(frozen=True)
class Kind:
    """One kind of application at 3x, with 8 requests at once.

    Kinds show which applications gain or lose by the oracle's knowledge.
    """

    application: str
    share: float
    """Share of all applications."""
    service_s: float
    """Mean demand, parallel requests summed."""
    deviation: float
    """Standard deviation of demands over their mean."""
    expected_s: float
    """Expected demand by its graph at arrival: the key of the lowest mean."""
    rank_s: float
    """The Gittins rank at arrival."""
    mean_s: dict[str, float]
    """Mean completion time by order, as in `Ablation`."""


@dataclass(frozen=True)
class Cached:
    """One cache under one policy."""

    cache: str
    policy: str
    hits: float
    """Share of calls with a hit on their turn."""
    mean_s: float
    hits_over: float
    """Relative gain of hits by prewarming: 0.1 is a tenth more."""
    mean_change: float
    """Relative change of the mean completion time by prewarming."""


@dataclass(frozen=True)
class Knob:
    """Warming up one container during the call before it."""

    backend: str
    knob: float
    saved_s: float
    wasted_s: float
    literal_saved_s: float
    """With the inequality as printed."""
    literal_wasted_s: float


@dataclass(frozen=True)
class Knowledge:
    """How much can be known about a workload's demands."""

    ordered_pairs: float
    """Share of pairs of applications of different kinds in which the lower mean demand belongs to the lower demand."""
    error_s: float
    """Mean absolute error, in seconds of service, of the expected remaining demand at second and later calls, by
    position alone.
    """
    refined_error_s: float
    """The same, with the refinement by observed calls."""
    announceable: float
    """Share of LLM calls that come after another backend's call, during which their needs can be warmed up."""


@dataclass(frozen=True)
class Hermes:
    """All results."""

    source: str
    """Where the demand samples come from."""
    completions: tuple[OrderResult, ...]
    in_time: tuple[InTime, ...]
    ablations: tuple[Ablation, ...]
    spreads: tuple[Spread, ...]
    real: tuple[RealArrivals, ...]
    larger: tuple[LargerModel, ...]
    bucketings: tuple[Bucketing, ...]
    kinds: tuple[Kind, ...]
    caches: tuple[Cached, ...]
    knobs: tuple[Knob, ...]
    knowledge: Knowledge
    policy_times: tuple[PolicyTime, ...]
    scale: tuple[ScaleResult, ...]


def reproduce(
    progress: Callable[[int, int], None] = lambda done, total: None,
    graphs: Path | None = None,
    seeds: int = len(SEEDS),
    quick: bool = False,
) -> Hermes:
    """Run all experiments, over the first `seeds` of SEEDS or as in `QUICK`; `find_graphs` finds demand samples."""
    seeds, least, ends = (1, 1, len(BUCKETS) - 1) if quick else (seeds, None, 1)
    scaled = (QUICK_APPLICATIONS, QUICK_LOADS) if quick else (APPLICATIONS_OF_SCALE, tuple(LOADS))
    source, samples = find_graphs(graphs)
    models = {name: ApplicationDemand(graph, RATES) for name, graph in learn_graphs(samples, 1_000_000).items()}
    counts = itertools.count(1)

    def done(result: Part) -> Part:
        progress(next(counts), 13)
        return result

    return Hermes(
        source,
        done(completions(samples, models, SEEDS[:seeds])),
        done(in_time(samples, models, SEEDS[:seeds])),
        done(ablations(samples, models, SEEDS[:seeds])),
        done(spreads(samples, SEEDS[:seeds], SPREADS[::ends])),
        done(real_arrivals(samples, models, SEEDS[:seeds], find_traces(graphs))),
        done(larger_model(samples, SEEDS[:seeds])),
        done(bucketings(samples, models, SEEDS[:seeds], BUCKETS[::ends])),
        done(kinds(samples, models, SEEDS[:seeds])),
        done(caches(samples, models, SEEDS[: min(2, seeds)], least)),
        done(knobs(models)),
        done(knowledge(samples, models, SEEDS[0])),
        done(policy_times(samples, models, SEEDS[0], MINUTES[:: len(MINUTES) - 1] if quick else MINUTES)),
        done(scale(samples, SEEDS[0], *scaled)),
    )


def completions(graphs: Sequence[DemandGraph], models: Models, seeds: Sequence[int]) -> tuple[OrderResult, ...]:
    """Return the completion times of the orders under three loads."""
    cases = [(engine, limits, load) for engine, limits in ENGINES.items() for load in LOADS]
    rows = []
    for engine, limits, load in cases:
        workloads = [draw_submissions(graphs, APPLICATIONS, LOADS[load] * 60, seed) for seed in seeds]
        kinds = [[replace(each, client=each.name) for each in workload] for workload in workloads]
        alone_s = fmean(alone(each, limits) for workload in workloads for each in workload)
        hermes = completion_seconds(workloads, application_gittins, DemandEstimates(models), limits)
        results = {
            "Hermes": hermes,
            "vLLM": completion_seconds(workloads, ByRequest, None, limits),
            "Parrot": completion_seconds(workloads, ByApplication, None, limits),
            "VTC": completion_seconds(kinds, VirtualTokens, None, limits),
            "VTC, one client each": completion_seconds(workloads, VirtualTokens, None, limits),
        }
        for order, seconds in results.items():
            mean_s, p95_s = float(seconds.mean()), float(np.percentile(seconds, 95))
            changes = (float(hermes.mean()) / mean_s - 1, float(np.percentile(hermes, 95)) / p95_s - 1)
            quantiles_s = tuple(np.quantile(seconds, QUANTILES).tolist())
            rows.append(OrderResult(engine, load, order, mean_s, p95_s, mean_s / alone_s, *changes, quantiles_s))
    return tuple(rows)


def alone(submission: Submission, limits: LLMLimits) -> float:
    """Return the seconds that an application takes on an idle LLM."""
    return simulate([replace(submission, arrival_s=0.0)], ByRequest(), limits).completion_s[0]


def in_time(graphs: Sequence[DemandGraph], models: Models, seeds: Sequence[int]) -> tuple[InTime, ...]:
    """Return the shares of deadlines that were kept.

    Each deadline is 1.2, 1.5 or 2 times the application's time on an idle LLM, with equal chances.
    """
    estimates = DemandEstimates(models)
    orders: dict[str, tuple[Callable[[], ApplicationOrder], DemandEstimates | None]] = {
        "Hermes, least slack": (ApplicationSlack, estimates),
        "Hermes, hopeless ones last": (lambda: ApplicationSlack(demote=True), estimates),
        "Hermes, Gittins": (application_gittins, estimates),
        "EDF": (EarliestDeadline, None),
        "vLLM": (ByRequest, None),
        "Parrot": (ByApplication, None),
    }
    rows = []
    for engine, limits in ENGINES.items():
        drawn = [_with_deadlines(graphs, seed, limits) for seed in seeds]
        factors = np.concatenate([chosen for _, chosen in drawn])
        for name, (order, known) in orders.items():
            kept = np.concatenate([simulate(each, order(), limits, known).in_time for each, _ in drawn])
            by_factor = (float(kept[factors == factor].mean()) for factor in FACTORS)
            rows.append(InTime(engine, name, float(kept.mean()), tuple(by_factor)))
    return tuple(rows)


def _with_deadlines(graphs: Sequence[DemandGraph], seed: int, limits: LLMLimits) -> tuple[list[Submission], Array]:
    """Return a workload with deadlines, and each deadline over the time on an idle LLM."""
    workload = draw_submissions(graphs, APPLICATIONS, LOADS["2x"] * 60, seed)
    factors = np.random.default_rng((seed, 2)).choice(FACTORS, len(workload))
    times = (factor * alone(each, limits) for each, factor in zip(workload, factors.tolist(), strict=True))
    return [replace(each, deadline_s=each.arrival_s + s) for each, s in zip(workload, times, strict=True)], factors


def ablations(graphs: Sequence[DemandGraph], models: Models, seeds: Sequence[int]) -> tuple[Ablation, ...]:
    """Return the gains by refinement, by the Gittins rank, and by full knowledge."""
    workloads = [draw_submissions(graphs, APPLICATIONS, LOADS["3x"] * 60, seed) for seed in seeds]
    rows = []
    for engine, limits in ENGINES.items():
        means = {name: float(each.mean()) for name, each in ablated(workloads, models, limits).items()}
        rows += [Ablation(engine, name, mean_s, mean_s / means["Hermes"] - 1) for name, mean_s in means.items()]
    return tuple(rows)


def kinds(graphs: Sequence[DemandGraph], models: Models, seeds: Sequence[int]) -> tuple[Kind, ...]:
    """Return the ablations with 8 requests at once, by application."""
    workloads = [draw_submissions(graphs, APPLICATIONS, LOADS["3x"] * 60, seed) for seed in seeds]
    seconds = ablated(workloads, models, ENGINES["8 at once"])
    names = np.array([each.name for workload in workloads for each in workload])
    service_s = np.array([sum(c.service_s(RATES) for c in each.calls) for workload in workloads for each in workload])
    rows = []
    for name in MIX:
        of_kind = names == name
        mean_s = {order: float(each[of_kind].mean()) for order, each in seconds.items()}
        demand_s = service_s[of_kind]
        deviation = float(demand_s.std() / demand_s.mean())
        at_arrival = RankedDemand(models[name].prior.total_s.tolist())
        known = (at_arrival.mean, at_arrival.rank(0.0))
        rows.append(Kind(name, float(of_kind.mean()), float(demand_s.mean()), deviation, *known, mean_s))
    return tuple(rows)


def caches(
    graphs: Sequence[DemandGraph], models: Models, seeds: Sequence[int], sizes: int | None = None
) -> tuple[Cached, ...]:
    """Return the cache results under Hermes' order, for all sizes or so many of each kind.

    500 applications in 15 minutes have contexts; 1,000 in 25 minutes have 200 adapters.
    """
    contexts = [draw_submissions(graphs, 500, 15 * 60, seed) for seed in seeds]
    adapters = [draw_submissions(graphs, 1000, 25 * 60, seed, adapters=200) for seed in seeds]
    rows = []
    for gigabytes in CONTEXT_GB[:sizes]:
        rows += _cached(f"KV, {gigabytes} GB", contexts, models, gigabytes * 1e9, lambda b: b / CONTEXT_RATE, True)
    for slots in ADAPTER_SLOTS[:sizes]:
        rows += _cached(f"LoRA, {slots} slots", adapters, models, slots, lambda _: ADAPTER_S, False)
    return tuple(rows)


def _cached(
    name: str,
    workloads: Sequence[Sequence[Submission]],
    models: Models,
    capacity: float,
    load_s: Callable[[float], float],
    contexts: bool,
) -> list[Cached]:
    results = {}
    for policy in POLICIES:
        runs = []
        for workload in workloads:
            cache = WarmCache(capacity, load_s, policy, contexts, None if contexts else ACTIVE_ADAPTERS)
            estimates = DemandEstimates(models)
            runs.append(simulate(workload, application_gittins(), LIMITS, estimates, cache, {}, Prewarming()))
        hits = sum(run.hits for run in runs) / sum(run.hits + run.misses for run in runs)
        results[policy] = hits, fmean(s for run in runs for s in run.completion_s)
    best_hits, best_s = results["prewarm"]
    return [
        Cached(name, policy, hits, mean_s, best_hits / hits - 1, best_s / mean_s - 1)
        for policy, (hits, mean_s) in results.items()
    ]


def knobs(models: Models) -> tuple[Knob, ...]:
    """Return the expected savings and idle times of containers by K, over the durations of the preceding unit."""
    rows = []
    for application, (published, backend, start_up_s) in CONTAINERS.items():
        model = models[application]
        names = [unit.name for unit in model.graph.units]
        unit = published if published in names else model.graph.start[0]
        following = [each.name for each in model.graph.units if each.backend == backend]
        probability = sum(model.next_probability(unit, name) for name in following)
        seconds = model.seconds(unit)
        for knob in KNOBS:
            both = (expected_effect(seconds, probability, knob, start_up_s, literal) for literal in (False, True))
            rows.append(Knob(backend, knob, *(value for effect in both for value in effect)))
    return tuple(rows)


def knowledge(graphs: Sequence[DemandGraph], models: Models, seed: int) -> Knowledge:
    """Return the knowledge measures of one workload."""
    workload = draw_submissions(graphs, APPLICATIONS, LOADS["1x"] * 60, seed)
    demands = [(float(models[s.name].prior.total_s.mean()), sum(c.service_s(RATES) for c in s.calls)) for s in workload]
    pairs = [(a, b) for a, b in itertools.combinations(demands, 2) if a[0] != b[0]]
    errors: list[tuple[float, float]] = []
    behind = calls = 0
    for submission in workload:
        model, seen, left_s = models[submission.name], None, sum(c.service_s(RATES) for c in submission.calls)
        for before, call in zip((None, *submission.calls), submission.calls, strict=False):
            if seen:
                means = (float(model.refined(call.unit, known).total_s.mean()) for known in (None, seen))
                errors.append(tuple(abs(mean_s - left_s) for mean_s in means))  # type: ignore[arg-type]
            left_s -= call.service_s(RATES)
            if call.on_llm:
                seen = Seen(call.unit, call.input_tokens, call.output_tokens, call.parallel)
                calls, behind = calls + 1, behind + (before is not None and not before.on_llm)
    error_s, refined_error_s = np.mean(errors, axis=0).tolist()
    right = fmean((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs)
    return Knowledge(right, error_s, refined_error_s, behind / calls)
