"""What a plan would gain: from one more device, or from a looser bound of the model that is furthest from its own."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from exegpt.app.models_file import Demand
from exegpt.app.planning import Proposal, propose
from exegpt.app.search import on_cluster
from exegpt.cluster import ClusterSpec
from exegpt.duration import duration_text
from exegpt.plan import Plan
from exegpt.quantity import figure_text

LOOSER = 1.5
"""By how much a bound is loosened."""


@dataclass(frozen=True)
class Gain:
    """What planning again under one change came to."""

    change: str
    headroom: float | None
    """The least of all models; None without rates, or without a plan."""
    seconds: float | None
    """Until all requests are done; None without such models, or without a plan."""
    reason: str = ""
    """Why there is no plan; empty where there is one."""

    def text(self, now: Plan | None) -> str:
        """A sentence, beside what the plan gives now."""
        if self.reason:
            return f"{self.change}: no plan either; {self.reason}"
        parts = []
        if self.headroom is not None:
            before = f", now {figure_text(now.headroom)}" if now and now.headroom else ""
            parts.append(f"every model could have {figure_text(self.headroom)} times its rate{before}")
        if self.seconds is not None:
            before = f", now after {duration_text(_seconds(now) or 0.0)}" if now and _seconds(now) else ""
            parts.append(f"all requests are done after {duration_text(self.seconds)}{before}")
        return f"{self.change}: {'; '.join(parts)}."


def gains(
    demands: tuple[Demand, ...],
    cluster: ClusterSpec,
    method: str,
    now: Plan | None,
    find: Callable[[tuple[Demand, ...], ClusterSpec, tuple[str, ...]], list[Proposal]] = propose,
) -> list[Gain]:
    """One more device (of several nodes one more node) and a looser bound of the tightest model, each planned anew by a
    method. `now`: the plan as it is, or what misses a rate; None where not even that is known.
    """
    larger = one_more(cluster)
    moved = tuple(replace(demand, setting=on_cluster(demand.setting, larger)) for demand in demands)
    what = "node" if cluster.nodes > 1 else "device"
    found = [_gain(f"One more {what}, {larger.name}", find(moved, larger, (method,))[0])]
    tightest = _tightest(demands, now)
    if tightest is not None and tightest.bound_s is not None:
        looser = tightest.within(LOOSER * tightest.bound_s)
        change = f"A bound of {duration_text(LOOSER * tightest.bound_s)} for '{tightest.name}'"
        loosened = tuple(looser if demand is tightest else demand for demand in demands)
        found.append(_gain(change, find(loosened, cluster, (method,))[0]))
    return found


def one_more(cluster: ClusterSpec) -> ClusterSpec:
    """A cluster with one more device, or where it has several nodes with one more node."""
    if cluster.nodes > 1:
        nodes = cluster.nodes + 1
        return replace(cluster, name=f"{nodes}x{cluster.devices_per_node}x{cluster.device.kind}", nodes=nodes)
    devices = cluster.devices_per_node + 1
    return replace(cluster, name=f"{devices}x{cluster.device.kind}", devices_per_node=devices)


def _gain(change: str, proposal: Proposal) -> Gain:
    return Gain(change, proposal.headroom, proposal.seconds, proposal.why_not)


def _tightest(demands: tuple[Demand, ...], now: Plan | None) -> Demand | None:
    """The model with a bound and the least headroom; without rates, that whose requests are done last; before there is a
    plan, the one with the tightest bound.
    """
    bounded = {demand.name: demand for demand in demands if demand.bound_s is not None}
    models = [model for model in now.models if model.name in bounded] if now else []
    if not bounded:
        return None
    if not models:
        return min(bounded.values(), key=lambda demand: demand.bound_s or math.inf)
    first = min(
        models, key=lambda model: (math.inf if model.headroom is None else model.headroom, -(model.seconds or 0.0))
    )
    return bounded[first.name]


def _seconds(plan: Plan) -> float | None:
    return max((model.seconds for model in plan.models if model.seconds is not None), default=None)
