"""Why no plan is possible, with the nearest possible one: the tightest bound, the fewest devices, the highest rates."""

from xcore.duration import duration_text
from xcore.quantity import counted, figure_text
from xcore.specs.cluster import ClusterSpec
from xcore.specs.cluster_plan import Plan, PlannedModel
from xmulti.plans.demands import ModelDemand
from xmulti.plans.model_frontier import lowest_latency_s, served_on
from xmulti.sharing.shared_devices import can_share

LOOSER, TRIES = 1.1, 20
"""The factor by which a bound is loosened, and the most tries.

A bound that the steady state meets is loosened until requests that arrive at random meet it too.
"""


def nothing_fits(demand: ModelDemand, cluster: ClusterSpec, policies: tuple[str, ...]) -> str:
    """Return the sentence for a model that runs on no number of devices within its bound."""
    near = nearest_bound(demand, cluster, policies)
    if near is None or demand.bound_s is None:
        return (
            f"Model '{demand.name}' fits on no part of {cluster.name}: use more devices, or devices with more memory."
        )
    bound_s, devices = near
    return (
        f"Model '{demand.name}' meets its bound of {duration_text(demand.bound_s)} on no part of {cluster.name}. "
        f"The tightest feasible bound that was found is {duration_text(bound_s)}, on {counted(devices, 'device')}: "
        "use that bound, or faster devices."
    )


def nearest_bound(demand: ModelDemand, cluster: ClusterSpec, policies: tuple[str, ...]) -> tuple[float, int] | None:
    """Return the tightest bound in seconds that a model meets at any rate, and the devices; None if it fits nowhere."""
    lowest = [
        (s, size) for size in demand.sizes(cluster) if (s := lowest_latency_s(demand, size, policies)) is not None
    ]
    if not lowest:
        return None
    bound_s, size = min(lowest)
    for _ in range(TRIES):
        if served_on(demand.within(bound_s), size, policies):
            return bound_s, size
        bound_s *= LOOSER
    return None


def no_room(demands: tuple[ModelDemand, ...], least: list[int], cluster: ClusterSpec, shared: bool) -> str:
    """Return the sentence for models that each run on some devices, but not all at once.

    `shared`: whether shared devices were tried too.
    """
    each = ", ".join(f"{demand.name} {size}" for demand, size in zip(demands, least, strict=True))
    more = "use more devices"
    if cluster.is_cpu:
        more = "use more of this machine (devices_per_node in `exegpt show local --yaml`)"
    never = [demand.name for demand in demands if not can_share(demand)]
    sharing = "" if shared else ", let models share devices (--method exegpt, for models with rates)"
    tried = ""
    if shared and never:
        tried = f" ({', '.join(never)} can't share devices, because they have no rate or have an encoder)"
    where = "one node" if demands[0].one_node else "one node or on whole nodes"
    return (
        f"The models don't fit on {cluster.name} together. They need at least {each} devices ({sum(least)} in all), "
        f"each model within {where}, but there are {cluster.devices}{tried}: {more}{sharing}, or "
        "plan fewer models."
    )


def rates_missed(plan: Plan) -> str:
    """Return the sentence for a plan that doesn't sustain all rates; empty if it does."""
    with_rates = [model for model in plan.models if model.headroom is not None]
    short = min(with_rates, key=lambda model: model.headroom or 0.0, default=None)
    if short is None or (short.headroom or 0.0) >= 1:
        return ""
    reached, rate = (f"{figure_text(value or 0.0)}/s" for value in (short.goodput_seq_s, short.rate_seq_s))
    devices = sum(len(replica.devices) for replica in plan.replicas[short.name])
    near = (
        f"the plan sustains {figure_text(short.headroom)} times all rates"
        if short.headroom
        else ("the plan sustains no rates")
    )
    return (
        f"These devices don't sustain all rates. Model '{short.name}' misses its rate by the most: it reaches "
        f"{reached} of {rate} on {counted(devices, 'device')}{_shared_with(short, plan)}; {near}."
    )


def _shared_with(model: PlannedModel, plan: Plan) -> str:
    """Return the names of the models on the same devices, whose rates count as much as this model's rate."""
    units = [unit for unit in plan.units if any(other.name == model.name for other in unit)]
    others = list(dict.fromkeys(other.name for unit in units for other in unit if other.name != model.name))
    return f", which it shares with {', '.join(map(repr, others))}" if others else ""
