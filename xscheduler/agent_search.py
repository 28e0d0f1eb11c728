"""Search the schedule with the highest turn throughput for agents in a closed loop, by replays of their turns.

No steady state has agents that wait for their tools, and no rate describes agents that wait for their last turns. So
every point of a policy's spaces is scored by a replay, as for a list of requests (list_search.py): a coarse grid of
each policy, then a finer one of the policies that are close to the best, and climbing from their best points.
"""

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from xcore.policies import TRAITS
from xcore.quantity import counted, percent_text
from xcore.specs.deployment import Deployment
from xcore.specs.model import usual_kv_dtype
from xcore.specs.schedule import Schedule
from xcore.specs.workload import Workload
from xscheduler.agent_sample import AgentSample
from xscheduler.candidates import CandidateFamily, Candidates
from xscheduler.list_meter import Played
from xscheduler.list_search import SLOW_POINT, ListLead, ListSearch
from xscheduler.loop_meter import LoopMeter
from xscheduler.open_searches import thread_count
from xscheduler.rate_sample import Arrivals
from xscheduler.search import Search, total
from xscheduler.search_problem import Limits, SearchProblem
from xscheduler.setting_search import SearchOptions
from xscheduler.settings import Setting
from xscheduler.space import Point
from xscheduler.spaces import twin
from xscheduler.ties import TIE, preferred
from xscheduler.tune import by_policy, check_asked, uncollected
from xscheduler.tuned import Alternative, Tuned
from xsimulator.cost.cost_model import CostModel
from xsimulator.steady.load import Load

T = TypeVar("T")

TURNS, FEWEST, MOST = 300_000, 40, 400
"""Turns that are replayed on a policy's finer grid and in climbing; the fewest and the most replays of it."""
COARSE = 0.3
"""Share of these replays on the first grid, and in climbing from it."""
CLOSE = 0.93
"""Share of the best policy's throughput from which a policy gets its finer grid."""
PROMISING, SAMPLED, KEPT = 8, 8, 2
"""Spaces with the highest bounds on the turn throughput; points of each that are replayed to choose among them; spaces
that are kept for their best points, and as many for the fastest ones that are not far beyond the bounds."""
LATE = 0.5
"""If no policy keeps the bounds: the excess, above the least one, up to which a policy gets its finer grid."""


@dataclass(frozen=True)
class AgentsTuned:
    """The answer for a number of agents."""

    tuned: Tuned
    agents: int
    cached_shares: dict[str, float]
    """The share of the prompts' tokens found in the cache, for each policy with a schedule."""
    closest: Schedule | None
    """The answer's schedule, or without one the schedule that exceeds the bounds the least."""
    played: Played | None
    """The result of the replay of the closest schedule."""

    @property
    def rate_seq_s(self) -> float:
        """The turns/s of the answer; 0 without one."""
        return _rate(self.tuned)


def tune_agents(
    setting: Setting,
    sample: AgentSample,
    limits: Limits,
    options: SearchOptions,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> AgentsTuned:
    """Return each policy's schedule with the highest turn throughput within the bounds, and the best of these.

    Policies that cache prefixes do so, if the turns' prompts share any.
    """
    check_asked(options.policies, options.fixed, options.admission)
    started = time.perf_counter()
    with uncollected():
        searches = agent_searches(setting, sample, limits, options)
        twins = {p: t for p, s in searches.items() if (t := twin(p, s.problem)) in searches and _alike(searches, p, t)}
        searched = [policy for policy in searches if policy not in twins]
        leads = _raced({policy: searches[policy] for policy in searched}, progress)
        for policy, other in twins.items():
            if like := leads.get(other or ""):
                leads[policy] = replace(like, schedule=replace(like.schedule, policy=policy))
    replays = sum(search.replayed for search in searches.values())
    size = sum(searches[policy].size for policy in searched)
    cost = Search("racing", replays, size, time.perf_counter() - started, replays)
    return _answer(searches, leads, sample, cost)


def agent_searches(
    setting: Setting, sample: AgentSample, limits: Limits, options: SearchOptions
) -> dict[str, "AgentSearch"]:
    """Return the search of each policy, on the engine that runs it."""
    shared = sample.prefixes is not None and not setting.model.encoder_layers
    workload = setting.workload.without_requests

    @functools.cache
    def computed(caches: bool) -> Workload:
        """Return the workload of the turns, without what an unlimited cache has of them."""
        turns = Workload.from_requests(setting.workload.name, sample.requests)
        if not caches:
            return turns
        inputs, outputs = (
            np.array([getattr(r, name) for r in sample.requests], dtype=np.float64) for name in ("input", "output")
        )
        return Arrivals(inputs, outputs, np.zeros(len(inputs)), False, sample.prefixes).computed(turns)

    def problem(on: Deployment, caches: bool) -> SearchProblem:
        model, kv_dtype = setting.model, setting.kv_dtype or usual_kv_dtype(on.profile.dtype)
        speculation, lengths = setting.speculation, computed(caches)
        tokens = computed(False).mean_tokens
        costs = CostModel(model, on.cluster, on.profile, kv_dtype, tokens=tokens, speculation=speculation)
        load, fixed = Load(lengths, model.encoder_layers > 0, speculation=speculation), dict(options.fixed)
        rules = options.bound, options.admission
        return SearchProblem(costs, load, limits, fixed, rules[0], admission=rules[1], open_system=True, finite=True)

    problems = dict[tuple[bool, bool], SearchProblem]()

    def search(policy: str, on: Deployment) -> AgentSearch:
        caches = shared and TRAITS[policy].caches_prefixes
        meter = LoopMeter(on.profile, sample, limits, fills_memory=caches)
        if (key := (on is setting.own, caches)) not in problems:
            problems[key] = problem(on, caches)
        return AgentSearch(policy, problems[key], meter, lambda s: _followed(s, caches, workload), 0)

    where = by_policy(options.policies, Deployment(setting.cluster, setting.profile), setting.own, lambda on: on)
    return {policy: search(policy, on) for policy, on in where.items()}


def _followed(schedule: Schedule, caches: bool, workload: Workload) -> Schedule:
    return replace(schedule, prefix_caching=caches, workload=workload)


class AgentSearch(ListSearch):
    """A search of one policy's spaces for agents."""

    meter: LoopMeter
    _spaces: tuple[Candidates, ...] = ()

    @property
    def replayed(self) -> int:
        """The number of replays so far."""
        return len(self._leads)

    def within(self, share: float) -> ListLead | None:
        """Return the best point that a share of the usual number of replays finds, with the known points."""
        turns = len(self.meter.requests)
        self.replays = round(share * min(max(TURNS // turns, FEWEST), MOST))
        return self.best(None)

    def replayed_at(self, space: Candidates, point: Point) -> ListLead | None:
        """Return a point with its replay; None if it doesn't fit in memory."""
        return self._lead(space, point)

    def _opened(self, members: Sequence[Candidates | CandidateFamily]) -> list[Candidates]:
        """Return the spaces of the finer grids: those with the best points in a few replays of promising spaces."""
        if not self._spaces:
            spaces = sorted(super()._opened(members), key=self._most_turns, reverse=True)[:PROMISING]
            if len(spaces) > KEPT:
                self.replays += PROMISING * (SAMPLED * SLOW_POINT if TRAITS[self.policy].disaggregated else SAMPLED)
                played = {space: best for space in spaces if (best := self._sampled(space))}
                strict = sorted(played, key=played.__getitem__)
                near = sorted(played, key=lambda s: (max(0.0, played[s].excess - LATE), played[s].seconds))
                spaces = list(dict.fromkeys((*strict[:KEPT], *near[:KEPT]))) or spaces[: 2 * KEPT]
            self._spaces = tuple(spaces)
        return list(self._spaces)

    def _most_turns(self, space: Candidates) -> float:
        """Return about the most turns/s: at the highest throughput, and with all agents at the lowest latency."""
        turns_s = space.ceiling / self.problem.load.workload.output.mean
        alone_s = space.quickest_s + self.meter.sample.mean_pause_s
        return min(turns_s, self.meter.sample.sessions.agents / alone_s) if alone_s > 0 else turns_s

    def _sampled(self, space: Candidates) -> Played | None:
        """Return a space's best point among a few: all agents or a third, and four other values each.

        Where none of them fits in memory, a tenth of the agents.
        """
        first, *others = space.variables
        values = [[self._between(v.values, part) for part in (0.0, 0.25, 0.5, 1.0)] for v in others]
        for parts in ((1, 3), (10,)):
            counts = (-(-self._share(space) // part) - first.values[0] for part in parts)
            batches = [min(max(0, place), len(first.values) - 1) for place in counts]
            points = itertools.islice(itertools.product(batches, *values), SAMPLED)
            if played := [lead.played for point in points if (lead := self._lead(space, point))]:
                return min(played)
        return None

    @staticmethod
    def _between(values: Sequence[int], part: float) -> int:
        """Return the place of the value that is closest to a part of the way from the first to the last, by ratio."""
        sought = values[0] ** (1 - part) * values[-1] ** part
        return min(range(len(values)), key=lambda place: abs(math.log(values[place] / sought)))


def _alike(searches: dict[str, AgentSearch], policy: str, other: str | None) -> bool:
    return other is not None and searches[policy].problem is searches[other].problem


def _raced(searches: dict[str, AgentSearch], progress: Callable[[int, int], None]) -> dict[str, ListLead]:
    """Return every policy's best point; a policy that is far behind on its coarse grid gets no finer one."""
    leads = dict[str, ListLead]()
    for done, (policy, lead) in enumerate(_together(lambda p: searches[p].within(COARSE), searches), 1):
        progress(done, 2 * len(searches))
        if lead:
            leads[policy] = lead
    least = min((lead.played for lead in leads.values()), default=None)
    close = {p: searches[p] for p, lead in leads.items() if least and _is_close(lead, least.excess, least.seconds)}
    for done, (policy, lead) in enumerate(_together(lambda p: searches[p].within(1.0), close), 1):
        progress(2 * len(searches) - len(close) + done, 2 * len(searches))
        if lead:
            leads[policy] = min(leads[policy], lead, key=lambda lead: lead.played)
    return leads


def _is_close(lead: ListLead, excess: float, seconds: float) -> bool:
    if excess:
        return lead.played.excess <= excess + LATE
    return lead.played.excess <= LATE and CLOSE * lead.played.seconds <= seconds


def _together(work: Callable[[str], T], policies: dict[str, AgentSearch]) -> Iterator[tuple[str, T]]:
    """Yield the results of `work` for each policy, from several threads: replays run without Python's lock."""
    with ThreadPoolExecutor(thread_count()) as threads:
        yield from zip(policies, threads.map(work, policies), strict=True)


def _answer(
    searches: dict[str, AgentSearch], leads: dict[str, ListLead], sample: AgentSample, cost: Search
) -> AgentsTuned:
    """Return the answer: policies that keep the bounds have schedules, with the estimates of their replays."""
    shares, alternatives, agents = dict[str, float](), list[Alternative](), sample.sessions.agents
    fastest = min((lead.played.seconds for lead in leads.values() if not lead.played.excess), default=None)
    for policy, search in searches.items():
        lead = leads.get(policy)
        if lead is None:
            alternatives.append(Alternative(policy, None, None, "none of its schedules fits in memory"))
        elif lead.played.excess or fastest is None:
            late = f"its times exceed the bounds by at least {percent_text(lead.played.excess)}"
            alternatives.append(Alternative(policy, None, None, f"{late} with {counted(agents, 'agent')}"))
        else:
            estimate, shares[policy] = search.meter.estimate(lead.schedule)
            reason = _reason(1 - fastest / lead.played.seconds)
            alternatives.append(Alternative(policy, lead.schedule, estimate, reason))
    best = preferred(
        (a for a in alternatives if a.schedule), lambda a: 1.0 / leads[a.policy].played.seconds, lambda a: a.policy
    )
    closest = min(leads.values(), key=lambda lead: lead.played, default=None)
    schedule = best.schedule if best else None
    if best:
        closest = leads[best.policy]
    tuned = Tuned(schedule, best.estimate if best else None, tuple(alternatives), cost, None, ())
    closest_schedule, played = (closest.schedule, closest.played) if closest else (None, None)
    return AgentsTuned(tuned, agents, shares, schedule or closest_schedule, played)


def _reason(behind: float) -> str:
    """Return how many fewer turns per second a policy has than the best one, as text."""
    if behind >= TIE:
        return f"has {percent_text(behind)} fewer turns per second than the best policy"
    return "has the highest turn throughput, or as high as any other policy"


def _rate(answer: Tuned | Alternative) -> float:
    return answer.estimate.throughput_seq_s if answer.estimate else 0.0


def best_of(answers: Sequence[AgentsTuned]) -> AgentsTuned:
    """Return the answer with the best schedule of each policy over several searches of the same policies."""
    best = max(answers, key=lambda answer: answer.rate_seq_s)
    if not best.rate_seq_s:
        best = min(answers, key=lambda answer: (answer.played is None, answer.played))
    alternatives, shares = [], dict[str, float]()
    for place in range(len(best.tuned.alternatives)):
        source = max(answers, key=lambda answer: _rate(answer.tuned.alternatives[place]))
        alternative = source.tuned.alternatives[place]
        if alternative.schedule:
            shares[alternative.policy] = source.cached_shares[alternative.policy]
            alternative = replace(alternative, reason=_reason(1 - _rate(alternative) / best.rate_seq_s))
        else:
            alternative = best.tuned.alternatives[place]
        alternatives.append(alternative)
    cost = total([answer.tuned.search for answer in answers])
    tuned = replace(best.tuned, alternatives=tuple(alternatives), search=cost)
    return replace(best, tuned=tuned, cached_shares=shares)
