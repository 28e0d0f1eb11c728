"""The performance of one of several models by its number of devices."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from xcore.processes import Processes
from xcore.specs.bound import ALL_REQUESTS
from xcore.specs.cluster import ClusterSpec
from xcore.specs.cluster_plan import PlannedModel
from xcore.specs.estimate import Estimate
from xcore.specs.schedule import Schedule
from xmulti.plans.demands import ModelDemand
from xscheduler.highest_goodput import MARGIN
from xscheduler.setting_search import on_cluster, search_schedule
from xscheduler.settings import Setting
from xscheduler.shortlist import MOST, best_by_replay

if TYPE_CHECKING:
    from xcore.specs.model import ModelSpec
    from xcore.specs.profile import Profile
    from xcore.specs.workload import Workload
    from xmulti.sharing.budgets import Budget
    from xscheduler.goodput import RateBounds
    from xscheduler.rate_sample import Arrivals

REQUESTS = 40_000
"""Requests of a search: a fifth of those with which `exegpt tune` measures a goodput.

A plan's are replayed again anyway.
"""
_NO_TIME_S = 1e-6
"""A bound that no schedule meets: a search then reports the lowest latency."""


@dataclass(frozen=True)
class ModelPerformance:
    """A model's performance on a number of devices."""

    devices: int
    schedule: Schedule
    estimate: Estimate
    goodput_seq_s: float | None
    seconds: float | None

    def planned(self, demand: ModelDemand, devices: tuple[int, ...] | None = None) -> PlannedModel:
        """Return the model on the first of these devices; None: on the cluster's first."""
        where = (tuple(range(self.devices)) if devices is None else devices)[: self.devices]
        rates, done = (demand.rate_seq_s, self.goodput_seq_s), (demand.requests, self.seconds)
        return PlannedModel(demand.name, where, self.schedule, self.estimate, *rates, *done)

    def budget(self, demand: ModelDemand) -> "Budget":
        """Return the budget, which the search of budgets compares."""
        from xmulti.sharing.budgets import Budget

        if demand.rate_seq_s is not None and self.goodput_seq_s is not None:
            return Budget(self.devices, self.goodput_seq_s / demand.rate_seq_s)
        return Budget(self.devices, seconds=math.inf if self.seconds is None else self.seconds)


Shape = tuple[int, int]
"""Number of nodes, and of devices of each."""


@dataclass(frozen=True)
class Known:
    """The known performance of equal models on parts of a cluster."""

    served: dict[Shape, ModelPerformance | None] = field(default_factory=dict)
    """Performance under the best of the quick policies if one runs, else under the best of all."""
    best: dict[Shape, ModelPerformance] = field(default_factory=dict)
    """Performance under the best of all policies."""


class ModelFrontier:
    """The performance of equal models by their number of devices, searched once for each."""

    def __init__(
        self, demand: ModelDemand, policies: tuple[str, ...], quick: tuple[str, ...] = (), known: Known | None = None
    ):
        """Set up the frontier, which extends what is `known` from earlier plans.

        With `quick` policies, a number of devices is searched for all policies only if no quick one runs.
        """
        self.demand, self.policies, self._quick = demand, policies, quick
        self._known = known or Known()

    @cached_property
    def _sizes(self) -> list[int]:
        return self.demand.sizes(self.demand.setting.cluster)

    @property
    def searched(self) -> tuple[tuple[int, ModelPerformance | None], ...]:
        """Searched numbers of devices, and the performance on them."""
        served = self._known.served
        return tuple((size, served[shape]) for size in self._sizes if (shape := self._shape(size)) in served)

    def on(self, devices: int) -> ModelPerformance | None:
        """Return the performance on `devices` devices; None if the model doesn't fit, or meets its bound at no rate."""
        shape = self._shape(devices)
        if shape not in self._known.served:
            self._known.served[shape] = served_quickly(self.demand, devices, self._quick, self.policies)
        return self._known.served[shape]

    def within(self, devices: int) -> ModelPerformance:
        """Return the performance on `devices` devices, or on the next fewer on which it runs; one is known to exist."""
        sizes = [size for size in self._sizes if size <= devices]
        return next(served for size in reversed(sizes) if (served := self.on(size)))

    @staticmethod
    def search(wanted: Sequence[tuple["ModelFrontier", int]], processes: Processes) -> None:
        """Search the frontiers at these numbers of devices."""
        new = _longest_first((f, n) for f, n in wanted if f._shape(n) not in f._known.served)
        asked = [(f.demand, n, f._quick, f.policies) for f, n in new]
        for (frontier, devices), served in zip(new, processes.each(served_quickly, asked), strict=True):
            frontier._known.served[frontier._shape(devices)] = served

    @staticmethod
    def with_all_policies(
        wanted: Sequence[tuple["ModelFrontier", int]], processes: Processes
    ) -> list[ModelPerformance]:
        """Return the performance of frontiers under the best of all policies, on numbers of devices.

        The models must run on these numbers.
        """
        new = _longest_first((f, n) for f, n in wanted if f._best_on(n) is None)
        asked = [(f.demand, n, f.policies, f._served(n)) for f, n in new]
        for (frontier, devices), served in zip(new, processes.each(improved, asked), strict=True):
            frontier._known.best[frontier._shape(devices)] = served
        best = [frontier._best_on(devices) for frontier, devices in wanted]
        return [served for served in best if served]

    def _best_on(self, devices: int) -> ModelPerformance | None:
        """Return the performance under the best of all policies; None if it isn't known."""
        served = self._served(devices)
        if served.schedule.policy not in self._quick:
            return served
        return self._known.best.get(self._shape(devices))

    def _served(self, devices: int) -> ModelPerformance:
        served = self.on(devices)
        assert served, "it does something on this number"
        return served

    def _shape(self, devices: int) -> Shape:
        nodes = max(1, devices // self.demand.setting.cluster.devices_per_node)
        return nodes, devices // nodes


def _longest_first(wanted: Iterable[tuple[ModelFrontier, int]]) -> list[tuple[ModelFrontier, int]]:
    """Return each entry once, those with the most devices first: their searches take longest."""
    return sorted(dict.fromkeys(wanted), key=lambda each: -each[1])


class Frontiers:
    """Frontiers that are kept from one plan to the next.

    The demands must be read with the same options, on clusters with the same devices and links.
    """

    def __init__(self) -> None:
        self._known: dict[object, Known] = {}

    def of(
        self, demands: Sequence[ModelDemand], policies: tuple[str, ...], quick: tuple[str, ...] = ()
    ) -> list[ModelFrontier]:
        """Return one frontier for each model; equal models get the same one."""
        alike = {
            demand.alike: ModelFrontier(
                demand, policies, quick, self._known.setdefault((demand.alike, policies, quick), Known())
            )
            for demand in demands
        }
        return [alike[demand.alike] for demand in demands]


def served_quickly(
    demand: ModelDemand, devices: int, quick: tuple[str, ...], policies: tuple[str, ...]
) -> ModelPerformance | None:
    """Return a model's performance under the best quick policy that can run it, else under the best of all policies."""
    return (served_on(demand, devices, quick) if quick else None) or served_on(demand, devices, policies)


def improved(demand: ModelDemand, devices: int, policies: tuple[str, ...], known: ModelPerformance) -> ModelPerformance:
    """Return a model's performance under the best of these policies, one of which is known.

    The other policies are searched only if they may be better.
    """
    if known.goodput_seq_s is None:
        return served_on(demand, devices, policies) or known
    others = tuple(policy for policy in policies if policy != known.schedule.policy)
    other = served_on(demand, devices, others, known.goodput_seq_s) if others else None
    return max((known, *([other] if other else [])), key=lambda served: served.goodput_seq_s or 0.0)


def served_on(
    demand: ModelDemand, devices: int, policies: tuple[str, ...], floor: float = 0.0
) -> ModelPerformance | None:
    """Return a model's performance on `devices` devices under the best of these policies.

    Return None if it doesn't run, or is far from a goodput of `floor` requests/s.
    """
    setting = on_cluster(demand.setting, part_of(demand.setting.cluster, devices))
    if demand.rate_seq_s is None:
        return _offline(demand, setting, policies)
    return _online(demand, setting, policies, floor)


def part_of(cluster: ClusterSpec, devices: int) -> ClusterSpec:
    """Return a part of a cluster with `devices` devices: part of one node, or whole nodes."""
    nodes = max(1, devices // cluster.devices_per_node)
    each = devices // nodes
    name = f"{nodes}x{each}x{cluster.device.kind}" if nodes > 1 else f"{each}x{cluster.device.kind}"
    return replace(cluster, name=name, nodes=nodes, devices_per_node=each)


def lowest_latency_s(demand: ModelDemand, devices: int, policies: tuple[str, ...]) -> float | None:
    """Return the tightest bound in seconds that a schedule meets on `devices` devices in the steady state.

    It includes the margin that a rate needs. Return None if not even one sequence fits.
    """
    setting = on_cluster(demand.setting, part_of(demand.setting.cluster, devices))
    if demand.rate_seq_s is None:
        return search_schedule(setting, _NO_TIME_S, policies=policies).lowest_latency_s
    from xscheduler.open_tune import tune_at

    asked = _asked(demand.within(_NO_TIME_S), setting)
    tuned = tune_at(*asked, None, bound=ALL_REQUESTS, policies=policies, kv_dtype=setting.kv_dtype).tuned
    lowest_s = tuned.lowest_latency_s
    return None if lowest_s is None else lowest_s / (1 - MARGIN)


def _asked(
    demand: ModelDemand, setting: Setting
) -> "tuple[ModelSpec, ClusterSpec, Workload, Profile, Arrivals, RateBounds]":
    """Return the first arguments of a search for goodput: within the bound less a margin."""
    from xscheduler.goodput import RateBounds
    from xscheduler.rate_sample import Arrivals

    bound_s = None if demand.bound_s is None else demand.bound_s * (1 - MARGIN)
    longest = setting.model.longest_request
    arrivals = Arrivals.poisson(setting.workload, longest, 0, setting.cluster.devices, REQUESTS)
    return setting.model, setting.cluster, setting.workload, setting.profile, arrivals, RateBounds(bound_s)


def _online(demand: ModelDemand, setting: Setting, policies: tuple[str, ...], floor: float) -> ModelPerformance | None:
    """Return the schedule with the highest goodput within the bound less a margin."""
    from xscheduler.open_tune import sustained_by

    sustained = sustained_by(
        *_asked(demand, setting), bound=ALL_REQUESTS, policies=policies, kv_dtype=setting.kv_dtype, floor=floor
    )
    if not sustained:
        return None
    best = max(sustained.values(), key=lambda policy: policy.goodput_seq_s)
    schedule = replace(best.schedule, latency_bound_s=demand.bound_s)
    return ModelPerformance(setting.cluster.devices, schedule, best.steady, best.goodput_seq_s, None)


def _offline(demand: ModelDemand, setting: Setting, policies: tuple[str, ...]) -> ModelPerformance | None:
    """Return the schedule that completes all requests first, among those with the highest throughput within the bound.

    A replay compares them, because the steady state ignores ramp-up and drain. For a long list, the steady state
    suffices.
    """
    from xsimulator.replay.event_simulator import replay

    assert demand.requests is not None
    drawn = setting.workload.without_requests.draw(demand.requests, 0, setting.model.longest_request)
    tuned = best_by_replay(search_schedule(setting, demand.bound_s, policies=policies), setting.profile, drawn)
    if tuned.schedule is None:
        return None
    if demand.requests > MOST and tuned.estimate:
        seconds = demand.requests / tuned.estimate.throughput_seq_s
        return ModelPerformance(setting.cluster.devices, tuned.schedule, tuned.estimate, None, seconds)
    run = replay(tuned.schedule, setting.profile, drawn, timeline=False)
    return ModelPerformance(setting.cluster.devices, tuned.schedule, run.estimate, None, run.seconds)
