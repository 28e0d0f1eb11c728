"""The searches of several policies for requests that arrive over time: their problems, spaces and replays."""

from collections.abc import Sequence
from functools import partial
from multiprocessing import parent_process
from typing import TypedDict

from xcore.batching.admission import Admission
from xcore.specs.bound import ALL_REQUESTS, BoundMeaning
from xcore.specs.cluster import ClusterSpec
from xcore.specs.deployment import Deployment
from xcore.specs.model import ModelSpec, usual_kv_dtype
from xcore.specs.profile import Profile
from xcore.specs.speculation import Speculation
from xcore.specs.workload import Workload
from xcore.usable_cpus import usable_cpus
from xscheduler.goodput import Meter, RateBounds
from xscheduler.open_search import OpenSearch
from xscheduler.rate_sample import Arrivals
from xscheduler.search_problem import Division, Limits, SearchProblem
from xscheduler.spaces import POLICIES, spaces
from xscheduler.tune import by_policy, check_asked
from xsimulator.cost.cost_model import CostModel
from xsimulator.steady.load import Load


class SearchedAt(TypedDict, total=False):
    """The options of a search at a rate."""

    bound: BoundMeaning
    policies: tuple[str, ...]
    kv_dtype: str | None
    fixed: dict[str, int] | None
    """Control variables with fixed values."""
    own: Deployment | None
    """This project's engine, for the policies that the profile's engine doesn't run."""
    admission: tuple[Admission, ...]
    """The admission rules to search."""
    prefix_caching: bool
    """Whether prompts share prefixes as in the arrivals."""
    speculation: Speculation | None
    """Speculative decoding in decode iterations; None: no draft tokens."""
    divisions: Sequence[Division]
    """Other divisions of the experts, which are searched too."""


def searches_at(
    model: ModelSpec,
    on: Deployment,
    workload: Workload,
    arrivals: Arrivals,
    bounds: RateBounds,
    *,
    bound: BoundMeaning = ALL_REQUESTS,
    policies: tuple[str, ...] = POLICIES,
    kv_dtype: str | None = None,
    fixed: dict[str, int] | None = None,
    own: Deployment | None = None,
    admission: tuple[Admission, ...] = ("reserve",),
    prefix_caching: bool = False,
    speculation: Speculation | None = None,
    divisions: Sequence[Division] = (),
) -> dict[str, list[OpenSearch]]:
    """Return each policy's searches within the bounds, one for each division of the experts; nothing is replayed yet.

    `SearchedAt` explains the options.
    """
    check_asked(policies, fixed or {}, admission)
    computed = arrivals.computed(workload) if prefix_caching else workload
    caching = workload if prefix_caching else None

    def asked(model: ModelSpec, on: Deployment) -> SearchProblem:
        rules = fixed, admission, speculation
        return problem_at(model, on.cluster, computed, on.profile, bounds, bound, kv_dtype, *rules)

    def searching(policy: str, problem: SearchProblem) -> OpenSearch:
        meter = Meter(problem.cost_model.profile, arrivals, bounds)
        return OpenSearch(problem, spaces(policy, problem), meter, caching, thread_count())

    every = [Division(model, on, own), *divisions]
    each = [by_policy(policies, of.on, of.own, partial(asked, of.model)) for of in every]
    return {policy: [searching(policy, problems[policy]) for problems in each] for policy in policies}


def problem_at(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    profile: Profile,
    bounds: RateBounds,
    bound: BoundMeaning,
    kv_dtype: str | None,
    fixed: dict[str, int] | None,
    admission: tuple[Admission, ...] = ("reserve",),
    speculation: Speculation | None = None,
) -> SearchProblem:
    """Return the search problem of a cluster at an arrival rate."""
    kept = kv_dtype or usual_kv_dtype(profile.dtype)
    cost_model = CostModel(model, cluster, profile, kept, False, None, workload.mean_tokens, speculation)
    load = Load(workload, model.encoder_layers > 0, speculation=speculation)
    limits = Limits(_slowest(bounds, workload))
    return SearchProblem(cost_model, load, limits, fixed or {}, bound, admission=admission, open_system=True)


def _slowest(bounds: RateBounds, workload: Workload) -> float | None:
    """Return the latency in seconds that no request of the bound's length may exceed, by any of the bounds."""
    tokens = bounds.ttft_s, bounds.tpot_s
    both = None if tokens[0] is None or tokens[1] is None else tokens[0] + (workload.p99_output - 1) * tokens[1]
    return min((s for s in (bounds.latency_s, both) if s is not None), default=None)


def thread_count() -> int:
    """Return one thread per CPU, or a single thread in a child process, whose siblings use the other CPUs."""
    return 1 if parent_process() else usable_cpus()
