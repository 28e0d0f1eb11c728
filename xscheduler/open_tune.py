"""Tune for requests that arrive over time: find the schedule with the highest goodput, over all policies."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from xcore.errors import InputError
from xcore.quantity import figure_text, percent_text
from xcore.specs.bound import ALL_REQUESTS, LONGEST, OF_LONGEST, BoundMeaning
from xcore.specs.cluster import ClusterSpec
from xcore.specs.deployment import Deployment
from xcore.specs.engine_spec import engine_of
from xcore.specs.estimate import Estimate
from xcore.specs.model import ModelSpec
from xcore.specs.profile import Profile
from xcore.specs.schedule import BLOCK_SIZE, Schedule
from xcore.specs.workload import Workload
from xscheduler.goodput import FINE, LEAST_LOAD, PRECISION, SIGMAS, Goodput, Meter, RateBounds
from xscheduler.open_search import COUNTS, PATIENCE, Lead, OpenSearch
from xscheduler.open_searches import SearchedAt, problem_at, searches_at, thread_count
from xscheduler.rate_sample import REQUESTS, WARM_UP, Arrivals
from xscheduler.search import Method, Search
from xscheduler.search_problem import SearchProblem
from xscheduler.spaces import POLICIES, spaces, twin
from xscheduler.ties import preferred
from xscheduler.tune import check_asked, uncollected
from xscheduler.tuned import Alternative, Tuned
from xscheduler.why_infeasible import lowest_latency_of, why_infeasible

if TYPE_CHECKING:
    from typing_extensions import Unpack

K = TypeVar("K")
T = TypeVar("T")

Key = tuple[str, int]
"""A policy, and the place of a division of the experts."""

FEW = 500
"""Fewer requests than this are too few for a 99th percentile."""
MOST_EXHAUSTIVE = 20_000
"""Maximum number of schedules for which an exhaustive search is accepted."""
CLOSE, LEADING = 0.93, 0.99
"""Shares of the best goodput: policies below the first aren't refined, below the second not measured with all requests.
"""
USUAL_LOAD = 0.8
"""Share of its goodput at which a server is evaluated if no rate is expected."""


@dataclass(frozen=True)
class Sustained:
    """The rate that a schedule serves within the bounds."""

    schedule: Schedule
    steady: Estimate
    """The estimate with as many waiting requests as the schedule can serve."""
    goodput: Goodput
    broken: str
    """The bound that breaks at a slightly higher rate; empty if only the steady throughput limits the rate."""

    @property
    def goodput_seq_s(self) -> float:
        """The sustained rate."""
        return self.goodput.low


@dataclass(frozen=True)
class Rated:
    """The result of tuning at an arrival rate."""

    tuned: Tuned
    """The estimates are replays at the rate; a policy that can't sustain the rate has none."""
    rate_seq_s: float
    sustained: dict[str, Sustained]
    """Every policy's best schedule, where one keeps the bounds."""

    def goodput(self, alternative: Alternative) -> float:
        """Return the rate that a policy's best schedule sustains; -1 if it has none."""
        best = self.sustained.get(alternative.policy)
        return best.goodput_seq_s if best else -1.0

    @property
    def highest_rate_seq_s(self) -> float:
        """The highest rate that any schedule sustains."""
        return max((s.goodput_seq_s for s in self.sustained.values()), default=0.0)


def tune_at(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    profile: Profile,
    arrivals: Arrivals,
    bounds: RateBounds,
    rate: float | None,
    *,
    method: Method = "bnb",
    progress: Callable[[int, int], None] = lambda done, total: None,
    **options: "Unpack[SearchedAt]",
) -> Rated:
    """Return the schedule with the highest goodput within the bounds, and its figures at `rate` requests/s.

    `rate` None means `USUAL_LOAD` of that goodput. The options are those of `searches_at`. Raises InputError for a
    method without support for open systems: `optuna`, and `exhaustive` on more than `MOST_EXHAUSTIVE` schedules.
    """
    where = (model, Deployment(cluster, profile), workload, arrivals, bounds)
    return tune_at_rates(*where, (rate,), method, progress, **options)[0]


def tune_at_rates(
    model: ModelSpec,
    on: Deployment,
    workload: Workload,
    arrivals: Arrivals,
    bounds: RateBounds,
    rates: Sequence[float | None],
    method: Method = "bnb",
    progress: Callable[[int, int], None] = lambda done, total: None,
    floor: float = 0.0,
    **options: "Unpack[SearchedAt]",
) -> list[Rated]:
    """Return what `tune_at` returns at each of several rates, from one search.

    `floor` is a rate in requests/s that something else is known to sustain. Policies far below it are left out.
    """
    started = time.perf_counter()
    with uncollected():
        divided = searches_at(model, on, workload, arrivals, bounds, **options)
        searches = {(policy, i): search for policy, alike in divided.items() for i, search in enumerate(alike)}
        members = [space for search in searches.values() for space in search.members]
        _check_method(method, sum(space.size for space in members))
        twins = _twins({key: search.problem for key, search in searches.items()})
        searched = {key: search for key, search in searches.items() if key not in twins}
        if method == "bnb":
            sustained = _raced(searched, progress, floor, profile=on.profile)
        else:
            sustained = {key: best for key, search in searched.items() if (best := _exhausted(search))}
        sustained = _with_twins(sustained, twins, searches)
        lowest = lowest_latency_of(members, next(iter(searches.values())).problem.limits)
    lowest_s = None if lowest == float("inf") else lowest
    result = Searched(*_best_divided(divided, sustained), tuple(searches.values()), on.profile, method, lowest_s)
    return [result.at(rate, started) for rate in rates]


def _best_divided(
    divided: dict[str, list[OpenSearch]], sustained: dict[Key, Sustained]
) -> tuple[dict[str, OpenSearch], dict[str, Sustained]]:
    """Return each policy's search of the division that sustains most, and its best schedule where it has one."""
    rates = {key: best.goodput_seq_s for key, best in sustained.items()}
    keys: dict[str, Key] = {
        policy: max(((policy, place) for place in range(len(alike))), key=lambda key: rates.get(key, -1.0))
        for policy, alike in divided.items()
    }
    searches = {policy: divided[policy][place] for policy, place in keys.values()}
    return searches, {policy: sustained[key] for policy, key in keys.items() if key in sustained}


@dataclass(frozen=True)
class Searched:
    """The best schedule of every policy within the bounds, at any rate."""

    searches: dict[str, OpenSearch]
    """The search of each policy's best division."""
    sustained: dict[str, Sustained]
    tried: tuple[OpenSearch, ...]
    """The searches of all divisions."""
    profile: Profile
    """The profile of the engine that was asked for."""
    method: Method
    lowest_latency_s: float | None

    def at(self, rate: float | None, started: float) -> Rated:
        """Return the figures of all policies at a rate, after a search that `started` then."""
        searches, sustained = self.searches, self.sustained
        goodputs = {policy: best.goodput_seq_s for policy, best in sustained.items()}
        at_rate = USUAL_LOAD * max(goodputs.values(), default=0.0) if rate is None else rate
        highest = _highest(searches, goodputs, self.profile)
        counts = {policy: _count(goodput, highest[policy]) for policy, goodput in goodputs.items()}

        def alternative(policy: str) -> Alternative:
            return _alternative(searches[policy], sustained.get(policy), at_rate, counts.get(policy, 0), policy)

        alternatives = tuple(_together(alternative, searches))
        winner = preferred(
            (a for a in alternatives if a.estimate),
            lambda a: sustained[a.policy].goodput_seq_s,
            lambda a: a.policy,
        )
        tuned = Tuned(
            winner.schedule if winner else None,
            winner.estimate if winner else None,
            alternatives,
            _cost(self.tried, self.method, time.perf_counter() - started),
            self.lowest_latency_s,
            self._assumptions(at_rate, winner),
        )
        return Rated(tuned, at_rate, sustained)

    def _assumptions(self, rate: float, winner: Alternative | None) -> tuple[str, ...]:
        first = next(iter(self.searches.values()))
        meter, problem = first.meter, first.problem
        return (
            *_assumptions(meter.bounds, problem.bound, meter.arrivals, rate, winner),
            *_cache_assumptions(problem, first.caching, meter.arrivals),
        )


def sustained_by(
    model: ModelSpec,
    cluster: ClusterSpec,
    workload: Workload,
    profile: Profile,
    arrivals: Arrivals,
    bounds: RateBounds,
    *,
    bound: BoundMeaning = ALL_REQUESTS,
    policies: tuple[str, ...] = POLICIES,
    kv_dtype: str | None = None,
    floor: float = 0.0,
) -> dict[str, Sustained]:
    """Return each policy's schedule with the highest goodput within the bounds, as `tune_at` finds it.

    `floor` is a rate in requests/s that something else is known to sustain. Policies far below it are left out.
    """
    check_asked(policies, {})
    problem = problem_at(model, cluster, workload, profile, bounds, bound, kv_dtype, None)
    with uncollected():
        searches = {
            (policy, 0): OpenSearch(
                problem, spaces(policy, problem), Meter(profile, arrivals, bounds), threads=thread_count()
            )
            for policy in policies
        }
        twins = _twins(dict.fromkeys(searches, problem))
        searched = {key: search for key, search in searches.items() if key not in twins}
        raced = _with_twins(_raced(searched, lambda done, total: None, floor), twins, searches)
    return {policy: best for (policy, _), best in raced.items()}


def _twins(problems: dict[Key, SearchProblem]) -> dict[Key, Key]:
    """Return the policies that need no separate search, each with the policy whose result they share."""
    twins = {key: (other, key[1]) for key, problem in problems.items() if (other := twin(key[0], problem))}
    return {key: other for key, other in twins.items() if problems.get(other) is problems[key]}


def _with_twins(sustained: dict[Key, Sustained], twins: dict[Key, Key], keys: Iterable[Key]) -> dict[Key, Sustained]:
    """Add the twins of policies that were searched; the result is in the order of `keys`."""

    def of(key: Key) -> Sustained | None:
        found = sustained.get(twins.get(key, key))
        return found and replace(found, schedule=replace(found.schedule, policy=key[0]))

    return {key: found for key in keys if (found := of(key))}


def _cost(searches: Iterable[OpenSearch], method: Method, seconds: float) -> Search:
    each = [(search.points, search.size, search.meter.replays) for search in searches]
    points, size, replays = (sum(counts) for counts in zip(*each, strict=True))
    return Search("racing" if method == "bnb" else method, points, size, seconds, replays)


def _together(work: Callable[[K], T], keys: Iterable[K]) -> Iterator[T]:
    """Yield the results of `work` for each key, in their order, from several threads.

    Replays run without Python's lock.
    """
    with ThreadPoolExecutor(thread_count()) as threads:
        yield from threads.map(work, keys)


def _count(goodput: float, highest: float) -> int:
    """Return the number of requests to measure a policy's best with: all if it may be the answer."""
    return REQUESTS if goodput >= LEADING * highest else COUNTS[1]


def _check_method(method: Method, size: int) -> None:
    if method == "optuna":
        raise InputError("Search method optuna does not support arrival rates: use bnb or exhaustive with --rate.")
    if method == "exhaustive" and size > MOST_EXHAUSTIVE:
        raise InputError(
            f"An exhaustive search at an arrival rate would replay {size:,} schedules, more than "
            f"{MOST_EXHAUSTIVE:,}: choose one policy with --policy, or use bnb."
        )


def _raced(
    searches: dict[Key, OpenSearch],
    progress: Callable[[int, int], None],
    floor: float = 0.0,
    profile: Profile | None = None,
) -> dict[Key, Sustained]:
    """Return every policy's best schedule of each division.

    A policy that is far behind on its grid is not refined, and is left out if there is a floor. Policies on the engine
    of `profile` are compared only with one another, because the best schedule of that engine is an answer too.
    """
    grids = _grids(searches, progress, floor)
    ahead = [policy for policy, leads in grids.items() if leads]
    most = _highest(searches, {policy: grids[policy][0].goodput for policy in ahead}, profile, floor)
    closer = dict(
        zip(ahead, _together(lambda name: _closer(searches[name], grids[name], most[name], floor), ahead), strict=True)
    )
    ahead = [policy for policy in ahead if closer[policy]]
    goodputs = {policy: closer[policy][0].goodput for policy in ahead}
    most = _highest(searches, goodputs, profile, floor)
    measured = _together(lambda name: _best(closer[name], searches[name], _count(goodputs[name], most[name])), ahead)
    sustained: dict[Key, Sustained] = {}
    for policy, best in zip(ahead, measured, strict=True):
        sustained[policy] = best
        progress(2 * len(searches) - len(ahead) + len(sustained), 2 * len(searches))
    return sustained


def _grids(
    searches: dict[Key, OpenSearch], progress: Callable[[int, int], None], floor: float
) -> dict[Key, list[Lead]]:
    """Return the best points on the grid of every policy and division, the best first.

    The last divisions have the fewest layouts. Their best points reject points of the others, unless these have so many
    spaces that a search looks at the first ones only (`PATIENCE`): the best of them may be further behind.
    """
    grids: dict[Key, list[Lead]] = {}
    best: dict[str, float] = {}
    """The highest rate of each policy so far."""

    def grid(key: Key) -> list[Lead]:
        search = searches[key]
        least = best.get(key[0], 0.0) if len(search.members) <= PATIENCE else 0.0
        return search.grid(CLOSE * max(floor, least))

    for division in sorted({place for _, place in searches}, reverse=True):
        keys = [key for key in searches if key[1] == division]
        for key, leads in zip(keys, _together(grid, keys), strict=True):
            grids[key] = leads
            best[key[0]] = max([best.get(key[0], 0.0), *(lead.goodput for lead in leads[:1])])
            progress(len(grids), 2 * len(searches))
    return grids


def _highest(
    searches: dict[K, OpenSearch], goodputs: dict[K, float], profile: Profile | None, floor: float = 0.0
) -> dict[K, float]:
    """Return, for each policy, the highest rate (requests/s) of its competitors.

    Competitors are all policies, or all policies on the same engine.
    """
    engine = engine_of(profile).name if profile else None

    def compared(policy: K, rival: K) -> bool:
        engines = [engine_of(searches[key].meter.profile).name for key in (policy, rival)]
        return engines[0] != engine or engines[1] == engine

    return {
        policy: max([floor, *(goodput for rival, goodput in goodputs.items() if compared(policy, rival))])
        for policy in goodputs
    }


def _closer(search: OpenSearch, grid: list[Lead], highest: float, floor: float) -> list[Lead]:
    """Return a policy's best points from its grid.

    Points near the highest rate are refined. Points far below it are returned unrefined, or left out if there is a
    floor.
    """
    if grid[0].goodput >= CLOSE * highest:
        return search.refined(grid)
    return [] if floor else grid[:1]


def _best(leads: list[Lead], search: OpenSearch, count: int) -> Sustained:
    """Return the best of the leads, each replayed with `count` requests.

    If that is all requests, the neighbours of the best lead are measured too.
    """
    meter = search.meter
    best: tuple[Lead, Goodput] | None = None
    waiting, seen, ahead, began = list(leads), set(), 0, 0.0
    while waiting:
        lead = waiting.pop(0)
        if (key := (lead.space, lead.point)) in seen:
            continue
        seen.add(key)
        above = best[1].low * (1 + PRECISION) if best else 0.0
        if above and not ahead:
            new = [other for other in waiting if (other.space, other.point) not in seen][: search.threads - 1]
            meter.look_ahead([each.schedule for each in (lead, *new)], above, count, measured=True)
            ahead = search.threads
        ahead = max(0, ahead - 1)
        if above and not meter.sustains(lead.schedule, above, count):
            continue
        start = max(lead.goodput, above)
        reached = meter.goodput(lead.schedule, lead.steady, count, start)
        if best is None or reached.low > best[1].low:
            best, ahead, began = (lead, reached), 0, start
            waiting += search.around(lead) if count == REQUESTS else []
    assert best is not None
    lead, reached = best
    if count == REQUESTS and meter.is_kept(lead.schedule):
        reached = meter.goodput(lead.schedule, lead.steady, count, began, FINE)
    return _sustained(lead, reached, search)


def _exhausted(search: OpenSearch) -> Sustained | None:
    lead = search.exhaustive(COUNTS[1])
    if lead is None:
        return None
    return _sustained(lead, search.meter.goodput(lead.schedule, lead.steady, REQUESTS, lead.goodput), search)


def _sustained(lead: Lead, reached: Goodput, search: OpenSearch) -> Sustained:
    meter, steady = search.meter, search.steady(lead)
    limit = meter.limit(lead.steady)
    broken = ""
    for times in (1.02, 1.05, 1.1) if reached.low < limit else ():
        beyond = max(reached.high * times, LEAST_LOAD * lead.steady)
        if not broken:
            broken = meter.bounds.broken(meter.served_at(lead.schedule, beyond, COUNTS[1]))
    bounds = meter.bounds
    schedule = replace(
        lead.schedule, latency_bound_s=bounds.latency_s, ttft_bound_s=bounds.ttft_s, tpot_bound_s=bounds.tpot_s
    )
    return Sustained(schedule, steady, reached, broken)


def _alternative(search: OpenSearch, best: Sustained | None, rate: float, count: int, policy: str) -> Alternative:
    """Return a policy's best schedule at `rate`, measured with `count` requests."""
    members, problem = search.members, search.problem
    if best is None:
        late = "sustains no rate: its requests are late even at the lowest rate"
        fits = any(member.ceiling > 0 for member in members)
        return Alternative(policy, None, None, late if fits else why_infeasible(policy, members, problem))
    reached, steady = best.goodput_seq_s, best.steady
    why = best.broken or f"its steady throughput is reached, limited by {steady.binding}"
    if reached < rate:
        if not reached:
            return Alternative(policy, None, None, f"sustains no rate: even at the lowest rate, {best.broken}")
        return Alternative(policy, None, None, f"sustains at most {figure_text(reached)}/s; above this rate, {why}")
    estimate = replace(
        search.meter.served_at(best.schedule, rate, count),
        memory_bytes=steady.memory_bytes,
        usable_bytes=steady.usable_bytes,
        kv_blocks=steady.kv_blocks,
        kv_tokens=steady.kv_tokens,
        engine=steady.engine,
        binding="latency" if best.broken else steady.binding,
        extrapolated=steady.extrapolated,
    )
    return Alternative(policy, best.schedule, estimate, f"sustains {figure_text(reached)}/s; above this rate, {why}")


def _who(bound: BoundMeaning) -> str:
    """Return the requests that must keep a latency bound at a rate."""
    longest = f"{percent_text(OF_LONGEST)} of the requests with the longest {percent_text(LONGEST)} of outputs"
    return longest if bound.of_length else bound.latency_text


def _assumptions(
    bounds: RateBounds, bound: BoundMeaning, arrivals: Arrivals, rate: float, winner: Alternative | None
) -> tuple[str, ...]:
    many = arrivals.sample(REQUESTS, winner.schedule.replicas if winner and winner.schedule else 1, bound).count
    few = "; with so few requests, percentiles are unreliable: pass a longer trace" if arrivals.count < FEW else ""
    assumptions = []
    if bounds.latency_s is not None:
        assumptions.append(f"bound: it holds for {_who(bound)}, counted from the arrival")
    assumptions.append(
        f"arrivals: {figure_text(rate, 6)}/s in an open system, so latency counts from the arrival; the figures "
        f"come from the event simulator over {many:,} requests, without the first {WARM_UP:.0%}{few}"
    )
    sure = f", with a margin of {SIGMAS:g} standard errors" if arrivals.random else ""
    ends = "" if bounds.end_queues else "; no bound limits a growing queue, so it is at most the steady throughput"
    assumptions.append(f"goodput: the highest rate within all bounds, to {PRECISION:.2%}{sure}{ends}")
    if winner and winner.estimate and winner.estimate.extrapolated:
        asked = ", ".join(winner.estimate.extrapolated)
        assumptions.append(
            f"the answer uses times beyond the profile's grid in {asked}: they are extrapolated linearly and less "
            "certain"
        )
    return tuple(assumptions)


def _cache_assumptions(problem: SearchProblem, caching: Workload | None, arrivals: Arrivals) -> tuple[str, ...]:
    """Return sentences on the effects of admission and prefix caching on the answer."""
    texts = []
    if "grow" in problem.admission:
        texts.append("admission grow: the replays preempt requests as an engine with this admission rule does")
    if caching and arrivals.prefixes is None:
        texts.append(
            f"prefix caching: workload {caching.name} does not say which prompts share a prefix, so no prompts "
            "share one"
        )
    elif caching and arrivals.prefixes:
        found = arrivals.prefixes.found(arrivals.inputs, BLOCK_SIZE).sum() / arrivals.inputs.sum()
        texts.append(
            f"prefix caching: an unlimited cache would hold {percent_text(found)} of the prompts' tokens, and "
            "steady throughputs leave them out; replays use only what fits in the KV blocks"
        )
    return tuple(texts)
