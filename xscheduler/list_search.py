"""Search each policy's control variables for a finite list of requests, with replays of that very list as the score.

A list starts on an empty machine and ends on one, which a steady state ignores: 41 requests may be served best by two
batches of 21. The search replays grids over a policy's spaces and its best schedule in the steady state, and climbs
from the best of these points. The number of replays depends only on the problem, so that every machine finds the same
schedule.
"""

import bisect
import functools
import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

import xsimulator
from xcore.arrays import Integers
from xcore.batching.admission import Admission, most_cached
from xcore.policies import TRAITS
from xcore.policies.control import kinds
from xcore.quantity import counted, percent_text
from xcore.specs.bound import ALL_REQUESTS, BoundMeaning
from xcore.specs.deployment import Deployment
from xcore.specs.model import usual_kv_dtype
from xcore.specs.schedule import BLOCK_SIZE, Schedule
from xcore.specs.workload import RequestLengths, Workload
from xscheduler.candidates import CandidateFamily, Candidates, Size
from xscheduler.candidates import schedule as schedule_of
from xscheduler.list_meter import ListMeter, Played, ReplayMeter
from xscheduler.open_search import coarse, neighbours
from xscheduler.search_problem import Limits, SearchProblem
from xscheduler.settings import Setting
from xscheduler.shortlist import MOST
from xscheduler.space import Point
from xscheduler.spaces import spaces, twin
from xscheduler.ties import TIE, preferred
from xscheduler.tune import by_policy, uncollected
from xscheduler.tuned import Alternative, Tuned
from xsimulator.cost.cost_model import CostModel
from xsimulator.steady.load import Load

REPLAYS, HALF = 12_000, 300
"""Number of replays of a very short list over all policies, and the length of a list that gets half as many."""
SLOWER = 30
"""A policy without a compiled replay gets fewer replays by this factor."""
RATIOS = (1.0, 1.02, 1.04, 1.08, 1.16, 1.3, 1.6, 2.0, 3.0, 5.0, 10.0, 30.0, 1e9)
"""Ratios of neighbouring values on a grid: the finest one that the number of replays allows, or both ends alone."""
EVEN = 12
"""The grids have the batches that divide the list into up to this many equal parts, if the replays allow it."""
SPACES, CLOSER = 24, 3
"""Number of spaces with the highest ceilings, and as many with the lowest latencies, that get a very coarse grid.

Then the best of them get a finer one.
"""
SLOW_POINT = 5
"""Time of a point that needs its steady state, over that of a replay of a few requests."""
STEPS = (1.25, 1.06, 1.0001)
"""Ratios by which variables are varied, one pass after the other; the last ratio means the next value."""
STARTS = 6
"""Number of points, different in more than their batches, from which the search climbs."""


@dataclass(frozen=True)
class ListLead:
    """A replayed schedule, and its point if it has one."""

    played: Played
    schedule: Schedule
    space: Candidates | None = None
    point: Point = ()


def tune_list(
    setting: Setting,
    steady: Tuned,
    requests: Sequence[RequestLengths],
    limits: Limits,
    *,
    policies: tuple[str, ...],
    bound: BoundMeaning = ALL_REQUESTS,
    fixed: Mapping[str, int] | None = None,
    admission: tuple[Admission, ...] = ("reserve",),
    prompts: Sequence[Sequence[int]] | None = None,
    adapt: Callable[[Schedule], Schedule] = lambda schedule: schedule,
) -> Tuned:
    """Return each policy's schedule that completes the requests first within the bounds, and the best of these.

    If no schedule keeps the bounds, the closest one is best. Estimates are those of the replays. A long list leaves the
    answer unchanged.

    Args:
        setting: The setting; the requests replace its workload.
        steady: The answer in the steady state, whose schedules are tried first.
        requests: The list.
        limits: The bounds.
        policies: Policies to search.
        bound: The meaning of the bounds.
        fixed: Control variables with fixed values.
        admission: Admission rules to search.
        prompts: Tokens of the prompts, if schedules may cache prefixes.
        adapt: Returns a schedule with other settings of its cache, as it will run.
    """
    if len(requests) > MOST:
        return steady
    started, workload = time.perf_counter(), Workload.from_requests(setting.workload.name, requests)
    meters: list[ListMeter] = []

    def problem(on: Deployment) -> tuple[SearchProblem, ListMeter]:
        kv_dtype, model = setting.kv_dtype or usual_kv_dtype(on.profile.dtype), setting.model
        costs, load = (
            CostModel(model, on.cluster, on.profile, kv_dtype, tokens=workload.mean_tokens),
            Load(workload, model.encoder_layers > 0),
        )
        meters.append(ListMeter(on.profile, requests, limits, prompts))
        finite = SearchProblem(
            costs, load, limits, dict(fixed or {}), bound, admission=admission, open_system=True, finite=True
        )
        return finite, meters[-1]

    where = by_policy(policies, Deployment(setting.cluster, setting.profile), setting.own, problem)
    first = {a.policy: a for a in steady.alternatives}
    leads, size = dict[str, ListLead](), 0
    with uncollected():
        for policy, (finite, meter) in where.items():
            like = leads.get(twin(policy, finite) or "")
            if like and where[like.schedule.policy][0] is finite:
                leads[policy] = replace(like, schedule=replace(like.schedule, policy=policy))
                continue
            search = ListSearch(policy, finite, meter, adapt, _replays(len(requests), len(policies)))
            lead = search.best(first[policy].schedule if policy in first else None)
            size += search.size
            if lead:
                leads[policy] = lead
    replays = sum(meter.replays for meter in meters)
    cost = replace(
        steady.search,
        evaluations=steady.search.evaluations + replays,
        space=steady.search.space + size,
        seconds=steady.search.seconds + time.perf_counter() - started,
        replays=replays,
    )
    least = min((lead.played.excess for lead in leads.values()), default=0.0)
    if steady.schedule is None and (least or not leads):
        return replace(steady, search=cost)
    alternatives = tuple(_alternative(policy, leads, where[policy][1], first.get(policy)) for policy in policies)
    best = preferred(
        (a for a in alternatives if a.schedule and leads[a.policy].played.excess == least),
        lambda a: 1.0 / leads[a.policy].played.seconds,
        lambda a: a.policy,
    )
    assert best is not None
    return replace(steady, schedule=best.schedule, estimate=best.estimate, alternatives=alternatives, search=cost)


def _replays(requests: int, policies: int) -> int:
    """Return the number of replays for each policy."""
    return round(REPLAYS / (1 + requests / HALF) / policies)


def _alternative(
    policy: str, leads: Mapping[str, ListLead], meter: ListMeter, steady: Alternative | None
) -> Alternative:
    """Return a policy's best schedule with the estimate of its replay, and how far it is behind the best.

    A policy that can't keep the bounds has no schedule, unless no policy can keep them.
    """
    if policy not in leads:
        return Alternative(policy, None, None, steady.reason if steady else "none of its schedules fits in memory")
    lead, requests = leads[policy], counted(len(meter.requests), "request")
    late = f"its times exceed the bounds by at least {percent_text(lead.played.excess)} in replays of the {requests}"
    in_time = [other.played.seconds for other in leads.values() if not other.played.excess]
    if lead.played.excess and in_time:
        return Alternative(policy, None, None, late)
    run, steady_state = meter.replayed(lead.schedule), xsimulator.estimate(lead.schedule, meter.profile)
    estimate = replace(
        run.estimate,
        memory_bytes=steady_state.memory_bytes,
        usable_bytes=steady_state.usable_bytes,
        kv_blocks=steady_state.kv_blocks,
        kv_tokens=steady_state.kv_tokens,
        engine=steady_state.engine,
        extrapolated=steady_state.extrapolated,
    )
    reason = late
    if not lead.played.excess:
        longer = lead.played.seconds / min(in_time) - 1
        reason = f"takes {percent_text(longer)} longer than the best policy to complete the {requests}"
        if longer < TIE:
            reason = f"completes the {requests} first, or as early as any other policy"
    return Alternative(policy, lead.schedule, estimate, reason)


@dataclass
class ListSearch:
    """A search of one policy's spaces for a list of requests."""

    policy: str
    problem: SearchProblem
    meter: ReplayMeter
    adapt: Callable[[Schedule], Schedule]
    replays: int
    """Number of replays that may follow."""
    size: int = 0
    """Number of points of the spaces."""
    _leads: dict[tuple[Candidates, Point], ListLead | None] = field(default_factory=dict)

    def best(self, steady: Schedule | None) -> ListLead | None:
        """Return the best point found, or the best schedule of the steady state if that is better."""
        members = spaces(self.policy, self.problem)
        self.size = sum(member.size for member in members)
        known = ListLead(self.meter.play(self.adapt(steady)), self.adapt(steady)) if steady else None
        if not (self.meter.is_fast(known.schedule) if known else TRAITS[self.policy].compiled is not None):
            self.replays //= SLOWER
        opened = self._opened(members)
        own = [space for space in opened if steady and _is_on(space, steady)][:1]
        leads = [known] if known else []
        if known and steady and own:
            everything, self.replays = self.replays, self.replays // 4
            leads.append(self._climbed(replace(known, space=own[0], point=_nearest(own[0], steady))))
            self.replays += everything - everything // 4
        if len(opened) > CLOSER:
            each = self.replays // (3 * len(opened))
            opened = sorted(opened, key=lambda space: self._grid_rank(space, each))[:CLOSER]
        each = 2 * self.replays // (3 * max(1, len(opened)))
        for space in opened:
            self._grid_rank(space, each)
        leads += map(self._climbed, self._starts())
        return self._trimmed(min(leads, key=lambda lead: lead.played)) if leads else None

    def _opened(self, members: Sequence[Candidates | CandidateFamily]) -> list[Candidates]:
        """Return the spaces with the highest ceilings on the throughput, and those with the lowest latencies."""
        highest = _first(members, lambda member: -member.ceiling)
        return list(dict.fromkeys([*highest, *_first(members, lambda member: member.quickest_s)]))

    # ---- grids ----

    def _grid_rank(self, space: Candidates, count: int) -> tuple[bool, Played | None]:
        """Replay the finest grid of a space that has at most `count` points; return the rank of its best point."""
        useful = [v.values[: self._useful(space, v.name, v.values)] for v in space.variables]
        kept: list[list[int]] = []
        for ratio in RATIOS:
            kept = [coarse(values, ratio) for values in useful]
            if math.prod(map(len, kept)) <= count:
                break
        more = sorted({*kept[0], *(place for place in self._even(space) if place < len(useful[0]))})
        if math.prod(map(len, kept[1:])) * len(more) <= count:
            kept[0] = more
        played = [lead.played for point in itertools.product(*kept) if (lead := self._lead(space, point))]
        return not played, min(played, default=None)

    def _useful(self, space: Candidates, name: str, values: Sequence[int]) -> int:
        """Return how many values of a variable have different effects on the list; at least 1."""
        kind, share = kinds(TRAITS[self.policy].control).get(name), self._share(space)
        most = {"residents": share, "prompts": share, "tokens": self._tokens(share) + share}.get(str(kind))
        return len(values) if most is None else max(1, min(bisect.bisect_left(values, most) + 1, len(values)))

    def _share(self, space: Candidates) -> int:
        """Return the most requests that one replica has at a time."""
        return self.meter.together(space.where.replicas)

    def _even(self, space: Candidates) -> set[int]:
        """Return the indices of the batches that divide a replica's requests into equal parts."""
        first, share = space.variables[0].values[0], self._share(space)
        return {max(0, -(-share // parts) - first) for parts in range(1, EVEN + 1)}

    # ---- climbing ----

    def _starts(self) -> list[ListLead]:
        """Return the best points that differ in more than their batches, the best first."""
        starts: dict[tuple[Candidates, Point], ListLead] = {}
        for lead in sorted(filter(None, self._leads.values()), key=lambda lead: lead.played):
            assert lead.space is not None
            starts.setdefault((lead.space, lead.point[1:]), lead)
        return list(starts.values())[:STARTS]

    def _climbed(self, lead: ListLead) -> ListLead:
        """Move to better neighbours until there are none, in smaller steps after larger ones."""
        for ratio in STEPS:
            better: ListLead | None = lead
            while better:
                lead, better = better, None
                for point in self._around(lead, ratio):
                    other = self._lead(lead.space, point) if lead.space else None
                    if other and other.played < lead.played:
                        better = other
                        break
        return lead

    def _around(self, lead: ListLead, ratio: float) -> Iterator[Point]:
        """Yield the neighbours of a point, and the points with the next batches that divide the list equally."""
        assert lead.space is not None
        first, share = lead.space.variables[0].values[0], self._share(lead.space)
        parts = -(-share // (first + lead.point[0]))
        for near in (parts - 1, parts, parts + 1):
            if near >= 1 and 0 <= (place := -(-share // near) - first) < len(lead.space.variables[0].values):
                yield (place, *lead.point[1:])
        yield from neighbours(lead.space, lead.point, ratio)

    # ---- a point ----

    def _lead(self, space: Candidates, point: Point) -> ListLead | None:
        """Return a point with its replay; None if it doesn't fit in memory, or if no replays are left."""
        if (space, point) not in self._leads:
            if self.replays <= 0:
                return None
            self._leads[space, point] = self._replayed(space, point)
        return self._leads[space, point]

    def _replayed(self, space: Candidates, point: Point) -> ListLead | None:
        schedule, widest = self._schedule(space, space.values(point)), self.problem.widest[1]
        self.replays -= SLOW_POINT if TRAITS[self.policy].disaggregated else 1
        if schedule is None:
            return None
        played = self.meter.play(schedule)
        if widest and played.together > widest * schedule.replicas:
            return None
        return ListLead(played, schedule, space, point)

    def _schedule(self, space: Candidates, values: tuple[int, ...]) -> Schedule | None:
        """Return the schedule of a point with a cache for its sequences of the list; None if that doesn't fit."""
        budget = space.budget(values)
        if budget is not None and values[0] > budget:
            return None  # vLLM refuses a token budget below the number of sequences
        if TRAITS[self.policy].disaggregated:
            fits = max(space.size_of(values).shares) <= 1.0
            return self.adapt(schedule_of(space, values, self.problem.limits)) if fits else None
        size = self._size(space, values)
        return self.adapt(schedule_of(space, values, self.problem.limits, size)) if size else None

    def _size(self, space: Candidates, values: tuple[int, ...]) -> Size | None:
        """Return the size of a point for the list's longest requests; None if not one of them fits."""
        traits, share = TRAITS[self.policy], self._share(space)
        control = traits.record({**space.controls(values), "grows": None, "kv_blocks": None})
        prompts = min(control.of_kind("prompts") or 1, share)
        together = min(control.of_kind("residents") or (share if traits.early_termination else prompts), share)
        tokens = control.of_kind("tokens") or self._tokens(prompts) + together
        room = space.where.replica.room((tokens, together))
        blocks = self._blocks
        most = room if self.meter.fills_memory else int(blocks[:together].sum())
        return Size(0.0, (0.0, 0.0), min(room, most), share) if room >= blocks[0] else None

    @functools.cached_property
    def _blocks(self) -> Integers:
        """The KV blocks of each request, falling."""
        load = self.problem.load
        drafted = load.speculation.drafted if load.speculation else 0
        tokens = (most_cached(r.input, r.output, load.encoder_decoder) + drafted for r in self.meter.requests)
        needs = (-(-each // BLOCK_SIZE) for each in tokens)
        return np.array(sorted(needs, reverse=True))

    def _tokens(self, prompts: int) -> int:
        """Return the tokens of the longest prompts."""
        return int(self._prompt_tokens[min(prompts, len(self._prompt_tokens)) - 1])

    @functools.cached_property
    def _prompt_tokens(self) -> Integers:
        """The tokens of the longest prompt, the two longest, and so on."""
        return np.cumsum(sorted((request.input for request in self.meter.requests), reverse=True))

    def _trimmed(self, lead: ListLead) -> ListLead:
        """Return the lead with as many blocks as it uses, and with the mean number of its sequences as its target."""
        schedule, played, traits = lead.schedule, lead.played, TRAITS[self.policy]
        if not played.blocks or traits.disaggregated or schedule.prefix_caching or not self.meter.at_once:
            return lead
        if schedule.admission == "reserve":
            schedule = self.adapt(replace(schedule, kv_blocks=min(played.blocks, schedule.kv_blocks)))
        return replace(lead, schedule=schedule)


def _first(
    members: Sequence[Candidates | CandidateFamily], order: Callable[[Candidates | CandidateFamily], float]
) -> list[Candidates]:
    """Return the first spaces in an order; a family's spaces are created when the family is next."""
    number, opened = itertools.count(), list[Candidates]()
    heap = [(order(member), next(number), member) for member in members]
    heapq.heapify(heap)
    while heap and len(opened) < SPACES:
        *_, member = heapq.heappop(heap)
        if isinstance(member, Candidates):
            opened.append(member)
            continue
        for space in member.spaces:
            assert isinstance(space, Candidates)
            heapq.heappush(heap, (order(space), next(number), space))
    return opened


def _is_on(space: Candidates, schedule: Schedule) -> bool:
    """Return whether a schedule is on a space's allocation, with the space's constants."""
    own, where = {**schedule.control.variables, "grows": schedule.admission == "grow"}, space.where
    same = (where.replica.stages, where.replicas) == (schedule.stages, schedule.replicas)
    return same and all(own.get(name, value) == value for name, value in space.constants.items())


def _nearest(space: Candidates, schedule: Schedule) -> Point:
    """Return the point whose values are the closest to a schedule's."""
    own = schedule.control.variables
    return tuple(
        min(range(len(v.values)), key=lambda place, v=v: abs(v.values[place] - (own.get(v.name) or 0)))  # type: ignore[misc]
        for v in space.variables
    )
