"""Advice on a plan: the gain of one more device, or of a looser bound for the tightest model."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from xcore.duration import duration_text
from xcore.errors import InputError
from xcore.quantity import figure_text
from xcore.specs.cluster import ClusterSpec
from xcore.specs.cluster_plan import Plan, PlannedModel
from xmulti.plans.demands import ModelDemand
from xmulti.plans.model_frontier import Frontiers
from xmulti.plans.planning import Proposal, propose
from xscheduler.setting_search import on_cluster

LOOSER = 1.5
"""Factor by which a bound is loosened."""

Propose = Callable[[tuple[ModelDemand, ...], ClusterSpec, tuple[str, ...], Frontiers, int | None], list[Proposal]]
"""Propose plans as `xmulti.plans.planning.propose` does."""


@dataclass(frozen=True)
class PlanGain:
    """The result of planning again under one change."""

    change: str
    cluster: str
    """The cluster for which it was planned."""
    model: str | None
    """The model whose bound is changed; None: no model's."""
    latency_bound_s: float | None
    """The changed bound."""
    headroom: float | None
    """The least of all models; None without rates, or without a plan."""
    seconds: float | None
    """Seconds until all requests are done; None without such models, or without a plan."""
    reason: str
    """Why there is no plan; empty if there is one."""

    def text(self, now: Plan | None) -> str:
        """Return a sentence without its full stop, compared with the current plan."""
        if self.reason:
            return f"{self.change}: there is no plan: {self.reason.rstrip('.')}"
        parts = []
        if self.headroom is not None:
            before = now.headroom if now else None
            beside = "" if before is None else f" (now {figure_text(before)} times)"
            parts.append(f"every model can reach {figure_text(self.headroom)} times its rate{beside}")
        if self.seconds is not None:
            done_s = _seconds(now) if now else None
            beside = "" if done_s is None else f" (now after {duration_text(done_s)})"
            parts.append(f"all requests are finished after {duration_text(self.seconds)}{beside}")
        return f"{self.change}: {'; '.join(parts)}"


def gains(
    demands: tuple[ModelDemand, ...],
    cluster: ClusterSpec,
    methods: tuple[str, ...],
    now: Plan | None,
    kept: Frontiers,
    most_replicas: int | None = None,
    find: Propose = propose,
) -> list[PlanGain]:
    """Return the gains of one more device (or node, of several nodes) and of a looser bound of the tightest model.

    Each is planned again by the best of these methods.

    Args:
        demands: The models' demands.
        cluster: The cluster of the plan.
        methods: The methods to plan with.
        now: The current plan, or the plan that misses a rate; None if neither is known.
        kept: The current plan's frontiers.
        most_replicas: The most groups of devices that a model may be in; None: no limit.
        find: Proposes plans.
    """

    def best(asked: tuple[ModelDemand, ...], where: ClusterSpec) -> Proposal:
        try:
            return find(asked, where, methods, kept, most_replicas)[0]
        except InputError as error:
            return Proposal(methods[0], None, str(error))

    found = []
    if not cluster.is_cpu:
        larger = one_more(cluster)
        moved = tuple(replace(demand, setting=on_cluster(demand.setting, larger)) for demand in demands)
        change = f"One more {'node' if cluster.nodes > 1 else 'device'} ({larger.name})"
        found.append(_gain(change, larger, None, best(moved, larger)))
    tightest = tightest_of(demands, now)
    if tightest is not None and tightest.bound_s is not None:
        looser = tightest.within(LOOSER * tightest.bound_s)
        loosened = tuple(looser if demand is tightest else demand for demand in demands)
        change = f"A bound of {duration_text(LOOSER * tightest.bound_s)} for '{tightest.name}'"
        found.append(_gain(change, cluster, looser, best(loosened, cluster)))
    return found


def advice_about(demands: tuple[ModelDemand, ...], cluster: ClusterSpec) -> str:
    """Return the changes that `gains` would try; empty if there are none."""
    more = "" if cluster.is_cpu else "one more node" if cluster.nodes > 1 else "one more device"
    looser = "a looser bound" if any(demand.bound_s is not None for demand in demands) else ""
    return " or ".join(filter(None, (more, looser)))


def one_more(cluster: ClusterSpec) -> ClusterSpec:
    """Return a cluster with one more device; if it has several nodes, with one more node."""
    if cluster.nodes > 1:
        nodes = cluster.nodes + 1
        return replace(cluster, name=f"{nodes}x{cluster.devices_per_node}x{cluster.device.kind}", nodes=nodes)
    devices = cluster.devices_per_node + 1
    return replace(cluster, name=f"{devices}x{cluster.device.kind}", devices_per_node=devices)


def tightest_of(demands: tuple[ModelDemand, ...], now: Plan | None) -> ModelDemand | None:
    """Return the model with a bound and the least headroom; None if no model has a bound.

    Among models with equal headroom, it is the model whose latency is closest to its bound; without rates, the model
    that finishes last. Without a plan, it is the model with the shortest bound.
    """
    bounded = {demand.name: demand for demand in demands if demand.bound_s is not None}
    models = [model for model in now.models if model.name in bounded] if now else []
    if not bounded:
        return None
    if not models:
        return min(bounded.values(), key=lambda demand: demand.bound_s or math.inf)

    def slack(model: PlannedModel) -> tuple[float, float, float]:
        latency_s, bound_s = model.estimate.latency_s or 0.0, bounded[model.name].bound_s or math.inf
        return math.inf if model.headroom is None else model.headroom, -latency_s / bound_s, -(model.seconds or 0.0)

    return bounded[min(models, key=slack).name]


def _gain(change: str, cluster: ClusterSpec, looser: ModelDemand | None, proposal: Proposal) -> PlanGain:
    model, bound_s = (looser.name, looser.bound_s) if looser else (None, None)
    return PlanGain(change, cluster.name, model, bound_s, proposal.headroom, proposal.seconds, proposal.why_not)


def _seconds(plan: Plan) -> float | None:
    return max((model.seconds for model in plan.models if model.seconds is not None), default=None)
