"""What one of several models does by its number of devices."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from exegpt.app.goodput import MARGIN
from exegpt.app.models_file import Demand
from exegpt.app.processes import Processes
from exegpt.app.search import on_cluster, search_schedule
from exegpt.app.settings import Setting
from exegpt.app.shortlist import MOST, best_by_replay
from exegpt.cluster import ClusterSpec
from exegpt.estimate import Estimate
from exegpt.plan import PlannedModel
from exegpt.schedule import Schedule

if TYPE_CHECKING:
    from xscheduler.multimodel.budgets import Budget
    from xscheduler.open_tune import Rated

REQUESTS = 40_000
"""Of a search: a fifth of what `exegpt tune` measures a goodput with, as a plan's are replayed once more anyway."""
_NO_TIME_S = 1e-6
"""A bound that nothing meets: then a search names the lowest latency."""


@dataclass(frozen=True)
class Served:
    """What a model does on so many devices."""

    devices: int
    schedule: Schedule
    estimate: Estimate
    goodput_seq_s: float | None
    seconds: float | None

    def planned(self, demand: Demand, devices: tuple[int, ...] | None = None) -> PlannedModel:
        """The model on the first of these devices; None: on the cluster's first."""
        where = (tuple(range(self.devices)) if devices is None else devices)[: self.devices]
        rates, done = (demand.rate_seq_s, self.goodput_seq_s), (demand.requests, self.seconds)
        return PlannedModel(demand.name, where, self.schedule, self.estimate, *rates, *done)

    def budget(self, demand: Demand) -> "Budget":
        """What the search of budgets compares."""
        from xscheduler.multimodel.budgets import Budget

        if demand.rate_seq_s is not None and self.goodput_seq_s is not None:
            return Budget(self.devices, self.goodput_seq_s / demand.rate_seq_s)
        return Budget(self.devices, seconds=math.inf if self.seconds is None else self.seconds)


class ModelFrontier:
    """What models that are alike do by their number of devices, searched once for each."""

    def __init__(self, demand: Demand, policies: tuple[str, ...], quick: tuple[str, ...] = ()):
        """With `quick` policies, a number of devices is searched for all policies only if none of these does."""
        self.demand, self.policies, self._quick = demand, policies, quick
        self._served: dict[int, Served | None] = {}

    @property
    def searched(self) -> tuple[tuple[int, Served | None], ...]:
        """Numbers of devices, and what it does on them, as far as they have been searched."""
        return tuple(self._served.items())

    def on(self, devices: int) -> Served | None:
        """On so many devices; None where it doesn't fit, or meets its bound at no rate."""
        if devices not in self._served:
            self._served[devices] = served_quickly(self.demand, devices, self._quick, self.policies)
        return self._served[devices]

    def within(self, devices: int) -> Served:
        """On so many, or on the next fewer that do, of which some are known to."""
        from xscheduler.multimodel.budgets import counts

        cluster = self.demand.setting.cluster
        sizes = [size for size in counts(cluster.nodes, cluster.devices_per_node) if size <= devices]
        return next(served for size in reversed(sizes) if (served := self.on(size)))

    @staticmethod
    def search(wanted: Sequence[tuple["ModelFrontier", int]], processes: Processes) -> None:
        """Let frontiers know what they do on these numbers of devices."""
        new = [(f, n) for f, n in dict.fromkeys(wanted) if n not in f._served]
        asked = [(f.demand, n, f._quick, f.policies) for f, n in new]
        for (frontier, devices), served in zip(new, processes.each(served_quickly, asked), strict=True):
            frontier._served[devices] = served

    @staticmethod
    def with_all_policies(wanted: Sequence[tuple["ModelFrontier", int]], processes: Processes) -> list[Served]:
        """What frontiers do on these numbers of devices, on which they do something, under the best of all policies."""
        known = {(f, n): served for f, n in wanted if not f._quick and (served := f.on(n))}
        new = [each for each in dict.fromkeys(wanted) if each not in known]
        asked = [(frontier.demand, devices, frontier.policies) for frontier, devices in new]
        for each, served in zip(new, processes.each(served_on, asked), strict=True):
            assert served, "it does something on this number"
            known[each] = served
        return [known[each] for each in wanted]


def served_quickly(demand: Demand, devices: int, quick: tuple[str, ...], policies: tuple[str, ...]) -> Served | None:
    """What a model does on so many devices under the best of the quick policies, if one does, else of all."""
    return (served_on(demand, devices, quick) if quick else None) or served_on(demand, devices, policies)


def served_on(demand: Demand, devices: int, policies: tuple[str, ...]) -> Served | None:
    """What a model does on so many devices under the best of these policies; None where it does nothing."""
    setting = on_cluster(demand.setting, part_of(demand.setting.cluster, devices))
    find = _offline if demand.rate_seq_s is None else _online
    return find(demand, setting, policies)


def part_of(cluster: ClusterSpec, devices: int) -> ClusterSpec:
    """So many devices of a cluster: of one node, or whole nodes."""
    nodes = max(1, devices // cluster.devices_per_node)
    each = devices // nodes
    name = f"{nodes}x{each}x{cluster.device.kind}" if nodes > 1 else f"{each}x{cluster.device.kind}"
    return replace(cluster, name=name, nodes=nodes, devices_per_node=each)


def lowest_latency_s(demand: Demand, devices: int, policies: tuple[str, ...]) -> float | None:
    """The tightest bound in seconds that some schedule meets on so many devices in the steady state, with the margin
    that a rate asks for; None where not one sequence fits.
    """
    setting = on_cluster(demand.setting, part_of(demand.setting.cluster, devices))
    if demand.rate_seq_s is None:
        return search_schedule(setting, _NO_TIME_S, policies=policies).lowest_latency_s
    lowest_s = _rated(demand.within(_NO_TIME_S), setting, policies).tuned.lowest_latency_s
    return None if lowest_s is None else lowest_s / (1 - MARGIN)


def _rated(demand: Demand, setting: Setting, policies: tuple[str, ...]) -> "Rated":
    """What each policy sustains within the bound less a margin."""
    from xscheduler.arrivals import Arrivals
    from xscheduler.goodput import Bounds
    from xscheduler.open_tune import tune_at

    bound_s = None if demand.bound_s is None else demand.bound_s * (1 - MARGIN)
    context = None if setting.model.architecture == "t5" else setting.model.context
    arrivals = Arrivals.poisson(setting.workload, context, 0, setting.cluster.devices, REQUESTS)
    where = (setting.model, setting.cluster, setting.workload, setting.profile, arrivals, Bounds(bound_s))
    options: dict[str, Any] = {"bound": "p99-queries", "policies": policies, "kv_dtype": setting.kv_dtype}
    return tune_at(*where, None, **options)


def _online(demand: Demand, setting: Setting, policies: tuple[str, ...]) -> Served | None:
    """The schedule with the highest goodput within the bound less a margin."""
    rated = _rated(demand, setting, policies)
    if not rated.sustained:
        return None
    best = max(rated.sustained.values(), key=lambda sustained: sustained.goodput_seq_s)
    schedule = replace(best.schedule, latency_bound_s=demand.bound_s)
    return Served(setting.cluster.devices, schedule, best.steady, best.goodput_seq_s, None)


def _offline(demand: Demand, setting: Setting, policies: tuple[str, ...]) -> Served | None:
    """The schedule that is done with all requests soonest, of those with the highest throughput within the bound: by a
    replay, as the steady state knows neither ramp-up nor drain; a long list is nearly all steady state.
    """
    from xsimulator.replay.event_simulator import replay

    assert demand.requests is not None
    context = None if setting.model.architecture == "t5" else setting.model.context
    drawn = setting.workload.without_requests.draw(demand.requests, 0, context)
    tuned = best_by_replay(search_schedule(setting, demand.bound_s, policies=policies), setting.profile, drawn)
    if tuned.schedule is None:
        return None
    if demand.requests > MOST and tuned.estimate:
        seconds = demand.requests / tuned.estimate.throughput_seq_s
        return Served(setting.cluster.devices, tuned.schedule, tuned.estimate, None, seconds)
    run = replay(tuned.schedule, setting.profile, drawn, timeline=False)
    return Served(setting.cluster.devices, tuned.schedule, run.estimate, None, run.seconds)
