"""Measure how many replicas of a layout sustain a rate: search their control variables, then add replicas."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from xcore.specs.deployment import Deployment
from xcore.specs.schedule import Schedule
from xscheduler.candidates import CandidateFamily, Candidates
from xscheduler.open_search import COUNTS, ROUGH, Lead, OpenSearch
from xscheduler.open_searches import searches_at
from xscheduler.replica_layout import NODE, DevicesNeeded, RateQuestion, ReplicaLayout, least

CONTENDERS = 4
"""Most points that are tried with all requests on a number of replicas."""
ALMOST = 0.03
"""Share of the rate that better control variables may add to a point of the grid."""
SMOOTHER = 0.15
"""Share of the replicas that may be saved because arrivals at each of many replicas are more regular than at few."""
FOLLOWED = 64
"""Most replicas that are replayed. With more, each serves at least as much, since their arrivals are as regular.

A group of replicas that share experts counts here as its replicas, and otherwise as one.
"""


def needed_by(
    layout: ReplicaLayout,
    most: float,
    asked: RateQuestion,
    hopeless: Callable[[int], bool] = lambda replicas: False,
) -> DevicesNeeded | int | None:
    """Return the fewest replicas of a layout that sustain the rate.

    Returns None if none of its schedules keeps the bounds, and a number if it needs at least so many, which is
    `hopeless`.

    Args:
        layout: The layout of a replica.
        most: A rate in requests/s that no replica exceeds.
        asked: The rate and the bounds.
        hopeless: Whether this many replicas, and any larger number, are too many to be an answer.
    """
    fewest = least(asked.rate_seq_s, most)
    if hopeless(fewest):
        return fewest
    useful = next((n for n in range(fewest, 2 * fewest + 8) if hopeless(n + 1)), None)
    if useful and not _promising(layout, useful, asked):
        return useful + 1
    trials = Trials.of(layout, fewest, asked)
    if not trials.leads:
        return None
    replicas = max(fewest, least(asked.rate_seq_s, trials.each))
    needs, best = max(fewest, int((1 - SMOOTHER) * replicas)), None
    while best is None:
        if hopeless(needs):
            return needs
        best = trials.sustaining(replicas)
        if best is None:
            needs, replicas = replicas + 1, replicas + max(1, replicas // 50)
    while replicas > fewest and (fewer := trials.sustaining(replicas - 1)):
        replicas, best = replicas - 1, fewer
    return DevicesNeeded(layout, replicas, *best, asked.price(layout, replicas))


def needed_drafting(
    layout: ReplicaLayout, most: float, asked: RateQuestion, hopeless: Callable[[int], bool]
) -> DevicesNeeded | int | None:
    """Return the fewest replicas of a layout that sustain the rate, over the numbers of draft tokens.

    As `needed_by`. The search climbs from the layout's own number to those that need fewer replicas.
    """
    drafts = asked.drafts
    if drafts is None:
        return needed_by(layout, most, asked, hopeless)
    known: dict[int, DevicesNeeded | int | None] = {}

    def each(drafted: int, highest: float) -> float:
        """Return the rate per replica needed, or at most that if it is hopeless; 0: no schedule keeps the bounds."""
        useful = asked.rate_seq_s / highest - 0.5 if highest else math.inf  # fewer than the best number needs
        drafting = layout.drafting(drafts.at(drafted))
        needed = needed_by(drafting, most, asked, lambda replicas: replicas > useful or hopeless(replicas))
        known[drafted] = needed
        return asked.rate_seq_s / (needed if isinstance(needed, int) else needed.replicas) if needed else 0.0

    best, _ = drafts.best(each, layout.drafted)
    return known[best]


@dataclass
class Trials:
    """The schedules of a layout that are tried on several numbers of replicas."""

    layout: ReplicaLayout
    asked: RateQuestion
    leads: list[tuple[OpenSearch, Lead]]
    """The best points so far, the best first, with their searches."""
    each: float
    """About the requests/s that a replica sustains."""
    refined: bool = False
    """Whether the best points of the grid were refined."""

    @staticmethod
    def of(layout: ReplicaLayout, replicas: int, asked: RateQuestion) -> "Trials":
        """Search the grid of control variables on a number of replicas."""
        leads = _leads(layout, replicas, asked)
        best = max((lead.goodput for _, lead in leads), default=0.0)
        return Trials(layout, asked, leads, best / _followed(layout, replicas))

    def sustaining(self, replicas: int) -> tuple[Schedule, float] | None:
        """Return a schedule that sustains the rate on these replicas, and its goodput; None if none does.

        Points of the grid that almost hold are refined.
        """
        best = next((found for one in self.leads[:CONTENDERS] if (found := self._held(*one, replicas))), None)
        if best or self.refined or not any(self._almost(*one, replicas) for one in self.leads[:CONTENDERS]):
            return best
        more = [(search, lead) for search, leads in self._by_search() for lead in search.refined(leads)]
        self.leads, self.refined = more + self.leads, True
        return next((found for one in more if (found := self._held(*one, replicas))), None)

    def _by_search(self) -> list[tuple[OpenSearch, list[Lead]]]:
        """Return each search with its best points, the best first."""
        searches = {id(search): search for search, _ in self.leads}
        return [(one, [lead for search, lead in self.leads if search is one]) for one in searches.values()]

    def _held(self, search: OpenSearch, lead: Lead, replicas: int) -> tuple[Schedule, float] | None:
        schedule, rate = self._on(lead, replicas)
        meter = search.meter
        limit = meter.limit(lead.steady * schedule.replicas / lead.schedule.replicas)
        if rate > limit or not (meter.holds(schedule, rate, COUNTS[0]) and meter.sustains(schedule, rate)):
            return None
        reached = meter.highest(schedule, rate, limit, COUNTS[1], ROUGH / 2)
        every = self.layout.shared * replicas
        return replace(schedule, replicas=every, cluster=self.layout.cluster(replicas)), (
            reached / rate * self.asked.rate_seq_s
        )

    def _almost(self, search: OpenSearch, lead: Lead, replicas: int) -> bool:
        schedule, rate = self._on(lead, replicas)
        return search.meter.holds(schedule, rate * (1 - ALMOST), COUNTS[0])

    def _on(self, lead: Lead, replicas: int) -> tuple[Schedule, float]:
        """Return the schedule of a point on the followed replicas, and the rate of these."""
        followed = _followed(self.layout, replicas)
        schedule = replace(lead.schedule, replicas=self.layout.shared * followed)
        return schedule, self.asked.rate_seq_s * followed / replicas


def _followed(layout: ReplicaLayout, replicas: int) -> int:
    return min(replicas, max(1, FOLLOWED // layout.shared))


def _promising(layout: ReplicaLayout, replicas: int, asked: RateQuestion) -> bool:
    """Return whether any point of the grid almost sustains the rate on these replicas; most points fail quickly."""
    followed = _followed(layout, replicas)
    floor = (1 - ALMOST) * asked.rate_seq_s * followed / replicas
    return any(search.grid(floor) for search in searches_of(layout, followed, asked))


def _leads(layout: ReplicaLayout, replicas: int, asked: RateQuestion) -> list[tuple[OpenSearch, Lead]]:
    """Return the best points of all policies on a number of replicas, the best first."""
    searches = searches_of(layout, _followed(layout, replicas), asked)
    leads = [(search, lead) for search in searches for lead in search.grid()]
    return sorted(leads, key=lambda one: -one[1].goodput)


def searches_of(layout: ReplicaLayout, replicas: int, asked: RateQuestion) -> list[OpenSearch]:
    """Return the searches of the policies, of the spaces without idle devices."""
    setting, search = layout.setting, asked.search
    nodes, per_node = -(-layout.devices // NODE) * replicas, min(layout.devices, NODE)
    cluster = replace(layout.cluster(replicas), nodes=nodes, devices_per_node=per_node)
    own = setting.own
    if own:
        own = replace(own, cluster=replace(cluster, memory_fraction=own.cluster.memory_fraction))
    searches = searches_at(
        setting.model,
        Deployment(cluster, setting.profile),
        setting.workload,
        asked.arrivals,
        asked.bounds,
        bound=search.bound,
        policies=search.policies,
        kv_dtype=setting.kv_dtype,
        fixed=search.fixed | layout.fixed(replicas),
        own=own,
        admission=search.admission,
        speculation=setting.speculation,
        prefix_caching=asked.prefix_caching,
    )
    return [replace(one, members=_whole(one, layout), threads=1) for alike in searches.values() for one in alike]


def _whole(search: OpenSearch, layout: ReplicaLayout) -> list[Candidates | CandidateFamily]:
    """Return the spaces whose replicas use all devices of the layout."""
    return [
        space
        for space in search.members
        if isinstance(space, CandidateFamily)
        or layout.shared * sum(stage.tp for stage in space.where.replica.decode.stages) == layout.devices
    ]
