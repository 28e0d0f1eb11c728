"""Tune: find the schedule with the highest throughput under the bounds, over all policies and allocations."""

import functools
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from xcore.batching.admission import Admission
from xcore.errors import InputError
from xcore.policies import TRAITS, control_variables, runs
from xcore.policies.adjustment import USUAL_SHARE
from xcore.quantity import figure_text, percent_text
from xcore.specs.bound import ALL_REQUESTS, BoundMeaning
from xcore.specs.cluster import ClusterSpec
from xcore.specs.deployment import Deployment
from xcore.specs.estimate import Binding
from xcore.specs.model import ModelSpec, usual_kv_dtype
from xcore.specs.profile import Profile
from xcore.specs.speculation import Speculation
from xcore.specs.workload import Workload
from xscheduler.advice import TIMES, busy_text, why_behind
from xscheduler.candidates import Candidates, schedule
from xscheduler.nearby import Nearby, search_near
from xscheduler.refine import refined
from xscheduler.relaxation import Gain, largest_gain
from xscheduler.search import Method, SearchResult, search, total
from xscheduler.search_problem import (
    ALLOCATION,
    ENCODE_MICRO_BATCHES,
    Division,
    Limits,
    SearchProblem,
    with_variables,
)
from xscheduler.space import Point, made_spaces
from xscheduler.spaces import POLICIES, SPACES, at_value, refined_variable, spaces
from xscheduler.ties import TIE, preferred
from xscheduler.tuned import Alternative, Tuned
from xscheduler.why_infeasible import Members, lowest_latency_of, why_infeasible
from xsimulator.cost.cost_model import CostModel
from xsimulator.estimates import GROWING
from xsimulator.steady.load import Load
from xsimulator.steady.residents import Form

SAME = 1e-9
"""The share by which throughputs of equal schedules may differ, as where devices share no experts."""
NEAR = 0.93
"""The share of the best throughput that a division needs on its grid to be searched around the grid's best points."""
SLACK = 5e-4
"""The share of the throughput that a smaller batch may lose."""


def tune(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    profile: Profile,
    *,
    latency_bound_s: float | None = None,
    bound: BoundMeaning = ALL_REQUESTS,
    ttft_s: float | None = None,
    tpot_s: float | None = None,
    policies: tuple[str, ...] = POLICIES,
    method: Method = "bnb",
    tolerance: float = 0.0,
    kv_dtype: str | None = None,
    fixed: dict[str, int] | None = None,
    most_resident: int | None = None,
    kv_blocks: int | None = None,
    steady_state: Form = "exact",
    variation: bool = True,
    encode_micro_batches: tuple[int, ...] = ENCODE_MICRO_BATCHES,
    partial: bool = True,
    admission: tuple[Admission, ...] = ("reserve",),
    lowest_latency: bool = False,
    own: Deployment | None = None,
    floor: float | None = None,
    near: Nearby | None = None,
    adjust: float | None = USUAL_SHARE,
    speculation: Speculation | None = None,
    divisions: Sequence[Division] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Tuned:
    """Search every policy on every allocation and return the best schedule.

    An allocation is the number of replicas, a tensor-parallel degree of the profile and the devices in groups of that
    degree. It also includes the micro-batches and WAA's split of the devices. With `partial`, the grouped devices are
    any multiple of the degree.

    Bounds are in seconds; None means no bound. `tolerance` is the share by which monotonicity may be broken. `fixed`
    sets control variables. `most_resident` caps the sequences that one replica decodes at a time, and `kv_blocks` their
    blocks. `encode_micro_batches` are the searched encoding micro-batches per stage. `admission` holds the searched
    admission rules, for policies and models that support them and whose steady state is known. `steady_state` and
    `variation` have the same meaning as in `xsimulator.estimate`. `lowest_latency` requests the lowest latency even if
    a schedule is found. `own` is this project's engine, for the policies that the profile's engine doesn't run (None:
    one engine for all). With a `floor` in tokens/s, only a schedule with more throughput is returned, without reasons,
    and with `near` the best one that a short search finds. `adjust` is `Schedule.adjust` of policies with a target.
    `speculation` is what decode iterations draft. `divisions` are other divisions of the experts, which are searched
    too. `progress` is called with the numbers of searched policies and of all policies.

    Raises InputError for an unknown policy, or for a profile without any degree that fits the cluster.
    """
    check_asked(policies, fixed or {}, admission)
    limits = Limits(latency_bound_s, ttft_s, tpot_s, most_resident, kv_blocks)
    load = Load.of(workload, model.encoder_layers > 0, steady_state, speculation=speculation)
    rest = (load, limits, fixed or {}, bound, variation, encode_micro_batches, partial, admission)

    def problem(of: Division, on: Deployment) -> SearchProblem:
        kept = kv_dtype or usual_kv_dtype(on.profile.dtype)
        costs = CostModel(of.model, on.cluster, on.profile, kept, False, None, workload.mean_tokens, speculation)
        return SearchProblem(costs, *rest, adjust=adjust)

    every = [Division(model, Deployment(cluster, profile), own), *divisions]
    each = [by_policy(policies, of.on, of.own, functools.partial(problem, of)) for of in every]
    problems = {policy: [by_division[policy] for by_division in each] for policy in policies}
    if floor is not None and near is not None:
        return _nearby(problems[near.schedule.policy][0], tolerance, floor, near)
    if floor is not None:
        return _above(problems, method, tolerance, floor)
    return _answer(problems, method, tolerance, lowest_latency, progress)


Problems = list[SearchProblem]
"""A policy's problems, one for each division of the experts."""


def _above(problems: dict[str, Problems], method: Method, tolerance: float, floor: float) -> Tuned:
    """Return the best schedule of all policies if its throughput exceeds the floor."""
    best: tuple[str, SearchResult, SearchProblem] | None = None
    searches = []
    with uncollected():
        for policy, alike in problems.items():
            _, result, problem = _best_searched(policy, alike, method, tolerance, floor)
            searches.append(result.search)
            if isinstance(result.space, Candidates) and result.throughput > floor:
                best, floor = (policy, result, problem), result.throughput
        won = _found(*best) if best else Alternative("", None, None, "")
    return Tuned(won.schedule, won.estimate, (won,) if best else (), total(searches), None, ())


def _nearby(problem: SearchProblem, tolerance: float, floor: float, near: Nearby) -> Tuned:
    """Return the best schedule of a short search, if its throughput exceeds the floor."""
    with uncollected():
        result = search_near(problem, tolerance, floor, near)
        best = _found(near.schedule.policy, result, problem) if result.space else None
    if best is None:
        return Tuned(None, None, (), result.search, None, ())
    return Tuned(best.schedule, best.estimate, (best,), result.search, None, ())


def _found(policy: str, result: SearchResult, problem: SearchProblem) -> Alternative:
    """Return a policy's best point as a schedule."""
    space, point = result.space, result.point
    assert isinstance(space, Candidates)
    values = space.values(point)
    return Alternative(policy, schedule(space, values, problem.limits), space.estimate(values), "")


Made = TypeVar("Made")


def by_policy(
    policies: tuple[str, ...], on: Deployment, own: Deployment | None, make: Callable[[Deployment], Made]
) -> dict[str, Made]:
    """Return for each policy the result of `make` for the deployment that runs it; one call per deployment."""
    made = functools.cache(lambda ours: make(own if ours and own else on))
    return {policy: made(own is not None and not runs(on.engine, policy)) for policy in policies}


def _answer(
    problems: dict[str, Problems],
    method: Method,
    tolerance: float,
    lowest_latency: bool,
    progress: Callable[[int, int], None],
) -> Tuned:
    """Search all policies and return the answer."""
    tried: list[tuple[str, Members, SearchResult, SearchProblem]] = []
    lowest = math.inf
    with uncollected():
        for policy, alike in problems.items():
            progress(len(tried), len(problems))
            tried.append((policy, *_best_searched(policy, alike, method, tolerance, 0.0)))
        leading = (1 - TIE) * max(result.throughput for _, _, result, _ in tried)
        alternatives = tuple(
            _alternative(policy, members, result, problem, tolerance, result.throughput >= leading)
            for policy, members, result, problem in tried
        )
        won = preferred((a for a in alternatives if a.estimate), _rate, lambda a: a.policy)
        if won:
            alternatives = _compared(alternatives, won)
        winner = next((a for a in alternatives if won and a.policy == won.policy), None)
        if lowest_latency or not winner:
            lowest = lowest_latency_of([space for _, members, *_ in tried for space in members], tried[0][-1].limits)
    return Tuned(
        winner.schedule if winner else None,
        winner.estimate if winner else None,
        alternatives,
        total([result.search for _, _, result, _ in tried]),
        lowest if math.isfinite(lowest) else None,
        _assumptions(tried[0][-1], tuple(problems), winner),
    )


def _best_searched(
    policy: str, problems: Problems, method: Method, tolerance: float, floor: float
) -> tuple[Members, SearchResult, SearchProblem]:
    """Return a policy's spaces of all divisions, and the best point of the best one with its problem.

    The last divisions have the fewest layouts: their best points end most of the others' searches early. The first wins
    ties.
    """
    members: Members = []
    results: list[tuple[SearchResult, SearchProblem]] = []
    highest = 0.0
    for problem in reversed(problems):
        more, result = _searched(policy, problem, method, tolerance, max(floor, NEAR * highest))
        members += more
        results.append((result, problem))
        highest = max(highest, result.throughput)
    best, problem = [one for one in results if one[0].throughput >= (1 - SAME) * highest][-1]
    return members, replace(best, search=total([result.search for result, _ in results])), problem


def _searched(
    policy: str, problem: SearchProblem, method: Method, tolerance: float, floor: float
) -> tuple[Members, SearchResult]:
    """Return a policy's spaces and their best point, if its throughput exceeds the floor."""
    members, name = spaces(policy, problem), refined_variable(policy, problem)
    lines = [space for space in members if isinstance(space, Candidates)]
    if name is None or method == "optuna" or len(lines) < len(members):
        return members, search(list(members), method, tolerance, floor)
    found, result = refined(lines, name, functools.partial(at_value, problem), method, tolerance, floor)
    return [*found], result


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable the garbage collector in this context.

    It would repeatedly look for cycles among a search's many small objects, which have few.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def check_asked(
    policies: tuple[str, ...], fixed: dict[str, int], admission: tuple[Admission, ...] = ("reserve",)
) -> None:
    """Raise InputError for policies, an admission rule or fixed variables that can't be searched.

    Examples are a policy without a search, and an admission rule that none of the policies supports. A variable must
    exist, and its value must be possible.
    """
    for policy in policies:
        if policy not in SPACES and (policy not in TRAITS or TRAITS[policy].disaggregated):
            raise InputError(f"Policy '{policy}' can't be searched: use one of {', '.join(SPACES)}.")
    growing = [name for name in SPACES if TRAITS[name].grows and name in GROWING]
    if "reserve" not in admission and not set(policies) & set(growing):
        raise InputError(
            f"Admission 'grow' has no steady-state formula for {', '.join(policies)}: use --admission reserve, or "
            f"one of {', '.join(growing)}."
        )
    for name, value in fixed.items():
        known = sorted({*control_variables(), *ALLOCATION})
        if name not in known:
            raise InputError(f"The variable {name} can't be fixed here: fix one of {', '.join(known)}.")
        if value < 1:
            raise InputError(f"The variable {name} was fixed to {value}, but it must be at least 1.")
    for policy in policies:
        TRAITS[policy].control.check(fixed)
    with_variables(policies, fixed)


def _alternative(
    policy: str, members: Members, result: SearchResult, problem: SearchProblem, tolerance: float, leads: bool
) -> Alternative:
    """Return a policy's best schedule and its limit: on any allocation if it leads, otherwise on its own allocation."""
    if not isinstance(result.space, Candidates):
        return Alternative(policy, None, None, why_infeasible(policy, members, problem))
    space, point = _plainest(members, result.space, result.point)
    point = _leanest(space, point)
    values = space.values(point)
    estimate = space.estimate(values)
    model = problem.cost_model.model  # with its division of the experts
    made = (space for space in made_spaces(members) if isinstance(space, Candidates))
    searched = (space for space in made if space.where.replica.cost_model.model is model)
    gain = largest_gain([space, *searched], point, problem, tolerance, leads)
    estimate = replace(estimate, binding=_binding(gain, estimate.binding))
    limited = f"limited by {estimate.binding}: {gain.text if gain else busy_text(estimate)}"
    return Alternative(policy, schedule(space, values, problem.limits), estimate, limited)


def _plainest(members: Members, space: Candidates, point: Point) -> tuple[Candidates, Point]:
    """Return an equivalent space that reserves, or the one with the smallest token budget.

    Its throughput is as good as that of this point, with the same other variables and the same allocation. Preemption
    is then avoided if unnecessary. A budget that is hardly ever reached only takes memory for activations.
    """
    enough, budget = space.at(point).throughput * (1 - SLACK), TRAITS[space.policy].name_of("tokens")

    def rank(candidate: Candidates) -> tuple[bool, int]:
        return bool(candidate.constants.get("grows")), candidate.constants.get(budget, 0) if budget else 0

    def others(candidate: Candidates) -> dict[str, int | None]:
        return {**candidate.constants, **dict.fromkeys(filter(None, ("grows", budget)))}

    plainer = [
        candidate
        for candidate in made_spaces(members)
        if isinstance(candidate, Candidates)
        and rank(candidate) < rank(space)
        and others(candidate) == others(space)
        and len(candidate.variables[0].values) > point[0]
        and candidate.where is space.where
    ]
    for candidate in sorted(plainer, key=rank):
        if candidate.at(point).throughput >= enough and candidate.meets(point):
            return candidate, point
    return space, point


def _leanest(space: Candidates, point: Point) -> Point:
    """Return the point with the smallest batch whose throughput is as good, with the same other variables.

    If more sequences gain no throughput, fewer have a lower latency.
    """
    enough = space.at(point).throughput * (1 - SLACK)
    first, last = 0, point[0]  # the throughput is enough at `last`
    while first < last:
        middle = (first + last) // 2
        middle_point = (middle, *point[1:])
        if space.at(middle_point).throughput >= enough and space.meets(middle_point):
            last = middle
        else:
            first = middle + 1
    return (last, *point[1:])


def _binding(gain: Gain | None, otherwise: Binding | None) -> Binding | None:
    """Return the binding limit: memory, a latency, or else the slower phase."""
    if gain and gain.name in TIMES:
        return "latency"
    return "memory" if gain and gain.name == "memory" else otherwise


def _compared(alternatives: tuple[Alternative, ...], best: Alternative) -> tuple[Alternative, ...]:
    """Add to each alternative's reason its distance to the best and the causes.

    Before, the reasons name only what limits the alternatives.
    """
    rest = [a for a in alternatives if a.estimate and a is not best]
    following = max(rest, key=_rate, default=None)

    def compared(alternative: Alternative) -> Alternative:
        limit = alternative.reason
        if alternative is best:
            return replace(best, reason=f"{_lead(best, following)}; {limit}", clause=limit)
        place, reasons = _behind(best, alternative)
        whole, clause = (f"{place}: {'; '.join(r)}" if r else place for r in (reasons, reasons[:1]))
        return replace(alternative, reason=f"{whole}; {limit}", clause=clause)

    return tuple(compared(a) if a.estimate else a for a in alternatives)


def _lead(best: Alternative, following: Alternative | None) -> str:
    """Return how far the best policy is ahead of the next, as text."""
    if following is None:
        return "the best"
    share = _rate(following) / _rate(best)
    if share >= 1 - TIE:
        return f"the best; {following.policy} is equally good"
    return f"the best; the next policy, {following.policy}, reaches {percent_text(share)} of its throughput"


def _behind(best: Alternative, other: Alternative) -> tuple[str, list[str]]:
    """Return a policy's distance to the best, and its causes."""
    share = _rate(other) / _rate(best)
    if share >= 1 - TIE:
        return f"equal to {best.policy}", []
    assert other.schedule and other.estimate and best.schedule and best.estimate
    reasons = why_behind((best.schedule, best.estimate), (other.schedule, other.estimate))
    return f"{percent_text(share)} of {best.policy}'s throughput", reasons


def _rate(alternative: Alternative) -> float:
    return alternative.estimate.throughput_tok_s if alternative.estimate else 0.0


def _assumptions(problem: SearchProblem, policies: tuple[str, ...], winner: Alternative | None) -> tuple[str, ...]:
    limits, assumptions = problem.limits, []
    if limits.latency_s is not None:
        assumptions.append(f"bound: it holds for {problem.bound.latency_text}, counted from the start of the prefill")
    if winner and winner.estimate and winner.estimate.extrapolated:
        asked = ", ".join(winner.estimate.extrapolated)
        assumptions.append(
            f"the answer uses times beyond the profile's grid in {asked}: they are extrapolated linearly and less "
            "certain"
        )
    if winner and winner.estimate and winner.schedule and winner.schedule.admission == "grow":
        often = figure_text(winner.estimate.preemptions_per_request)
        assumptions.append(
            "admission grow: the cache holds the 95th percentile of the KV blocks in use; a request is preempted "
            f"{often} times on average"
        )
    reserving = [name for name in policies if "grow" in problem.admission and "grow" not in problem.admissions(name)]
    if reserving:
        assumptions.append(
            f"admission grow is not searched for {', '.join(reserving)}: it has no steady-state formula with these "
            "policies"
        )
    return tuple(assumptions)
