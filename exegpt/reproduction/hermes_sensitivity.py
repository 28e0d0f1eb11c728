"""Sensitivity of Hermes' figures to the spread of runs, arrivals, the model's size, and the number of buckets."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from exegpt.reproduction.hermes_arrivals import consecutive
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
from exegpt.reproduction.hermes_workload import draw_submissions, learn_graphs
from xcore.applications.demand import ApplicationDemand, ServiceRates
from xcore.applications.demand_graph import DemandGraph
from xcore.arrays import Array
from xcore.orders.gittins import RankedDemand
from xmulti.applications.application_progress import DemandEstimates
from xmulti.applications.orders import ByRequest, application_gittins

SPREADS = (0.0, 0.3, 0.6, 0.9, 1.2)
"""Deviations of the logarithm of a run's common size, beside the published samples' own spread.

The paper doesn't say how far runs of one application differ as a whole; no spread is assumed elsewhere.
"""
LARGER = 26.0 / 13.5
"""LLaMA-2-13B's bytes of weights over 7B's, and so, as an assumption, its seconds over 7B's."""
LARGER_LIMITS = replace(
    LIMITS,
    rates=ServiceRates(RATES.prefill_s * LARGER, RATES.decode_s * LARGER),
    batch=8,
    kv_tokens=12_200,
    kv_bytes_per_token=819_200,
)
"""LLaMA-2-13B on the same A100: 26 GB of weights leave 10 of 36 GB, at 2 x 40 layers x 5,120 x 2 bytes a token."""
BUCKETS = (5, 10, 20, 40, 80)
"""Numbers of buckets at whose boundaries ranks are computed (Figure 15b)."""


@dataclass(frozen=True)
class Spread:
    """The ablations at 3x with 8 requests at once, if runs of one application differ by a common factor."""

    spread: float
    mean_s: float
    over_hermes: dict[str, float]
    """By ablation: 0.1 means a tenth longer."""


@dataclass(frozen=True)
class RealArrivals:
    """Mean completion at 1x with 8 requests at once, for arrivals of one kind."""

    arrivals: str
    hermes_s: float
    vllm_s: float
    reduction: float
    """Relative change by Hermes: -0.5 is half."""


@dataclass(frozen=True)
class LargerModel:
    """An ablation at 3x with LLaMA-2-13B (Figure 12)."""

    name: str
    mean_s: float
    over_hermes: float
    """0.1 means a tenth longer."""


@dataclass(frozen=True)
class Bucketing:
    """One number of buckets: the policy's time and its effect at 3x, with 8 requests at once (Figure 15b)."""

    buckets: int
    policy_ms: float
    """Median time to rank each application's demand over its whole service."""
    mean_s: float


def spreads(
    graphs: Sequence[DemandGraph], seeds: Sequence[int], values: Sequence[float] = SPREADS
) -> tuple[Spread, ...]:
    """Return the ablations for each spread of runs; demand graphs are learned from runs of the same spread."""
    rows = []
    for spread in values:
        models = {n: ApplicationDemand(g, RATES) for n, g in learn_graphs(graphs, 1_000_000, spread).items()}
        workloads = [draw_submissions(graphs, APPLICATIONS, LOADS["3x"] * 60, seed, spread=spread) for seed in seeds]
        means = {n: float(each.mean()) for n, each in ablated(workloads, models, ENGINES["8 at once"]).items()}
        over = {name: mean_s / means["Hermes"] - 1 for name, mean_s in means.items() if name != "Hermes"}
        rows.append(Spread(spread, means["Hermes"], over))
    return tuple(rows)


def real_arrivals(
    graphs: Sequence[DemandGraph], models: Models, seeds: Sequence[int], traces: dict[str, Array]
) -> tuple[RealArrivals, ...]:
    """Return the gain over vLLM with exponential bursts, and with consecutive arrivals of each trace."""
    window_s, limits, rows = LOADS["1x"] * 60, ENGINES["8 at once"], []
    for name, arrivals in {"exponential bursts": None, **traces}.items():
        workloads = []
        for seed in seeds:
            workload = draw_submissions(graphs, APPLICATIONS, window_s, seed)
            if arrivals is not None:
                arrivals_s = consecutive(arrivals, APPLICATIONS, window_s, seed)
                workload = tuple(replace(each, arrival_s=at) for each, at in zip(workload, arrivals_s, strict=True))
            workloads.append(workload)
        hermes_s = float(completion_seconds(workloads, application_gittins, DemandEstimates(models), limits).mean())
        vllm_s = float(completion_seconds(workloads, ByRequest, None, limits).mean())
        rows.append(RealArrivals(name, hermes_s, vllm_s, hermes_s / vllm_s - 1))
    return tuple(rows)


def larger_model(graphs: Sequence[DemandGraph], seeds: Sequence[int]) -> tuple[LargerModel, ...]:
    """Return the ablations for LLaMA-2-13B, with 8 requests at once."""
    learned = learn_graphs(graphs, 1_000_000)
    models = {name: ApplicationDemand(graph, LARGER_LIMITS.rates) for name, graph in learned.items()}
    workloads = [draw_submissions(graphs, APPLICATIONS, LOADS["3x"] * 60, seed) for seed in seeds]
    means = {n: float(each.mean()) for n, each in ablated(workloads, models, LARGER_LIMITS).items()}
    return tuple(LargerModel(name, mean_s, mean_s / means["Hermes"] - 1) for name, mean_s in means.items())


def bucketings(
    graphs: Sequence[DemandGraph], models: Models, seeds: Sequence[int], numbers: Sequence[int] = BUCKETS
) -> tuple[Bucketing, ...]:
    """Return the time of the policy and the mean completion for each number of buckets."""
    workloads, rows = [draw_submissions(graphs, APPLICATIONS, LOADS["3x"] * 60, seed) for seed in seeds], []
    for buckets in numbers:
        estimates = DemandEstimates(models, buckets=buckets)
        mean_s = float(completion_seconds(workloads, application_gittins, estimates, ENGINES["8 at once"]).mean())
        rows.append(Bucketing(buckets, _policy_ms(models, buckets), mean_s))
    return tuple(rows)


def _policy_ms(models: Models, buckets: int) -> float:
    times = []
    for model in models.values():
        demand = RankedDemand(model.prior.total_s.tolist(), buckets)
        begin_s = time.perf_counter()
        for bucket in range(buckets):
            demand.rank(math.nextafter((bucket + 0.5) * demand.most / buckets, 0.0))
        times.append((time.perf_counter() - begin_s) * 1e3)
    return median(times)
