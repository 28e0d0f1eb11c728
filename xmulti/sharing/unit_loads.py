"""The loads of a plan's unit: each model's iterations, pool of blocks, order and rule of sharing, for its replay."""

from collections.abc import Mapping
from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from xcore.batching import Hints, Order
from xcore.batching.kv_pool import KVPool
from xcore.batching.shared_pool import block_of, least_quota, shared_pools
from xcore.errors import InputError
from xcore.orders import fcfs
from xcore.orders.doubling_budget import DoublingBudget
from xcore.policies import orca
from xcore.policies.one_phase import OnePhasePolicy
from xcore.policies.priority_sharing import PrioritySharing
from xcore.policies.sharing import Sharing, SpatialSharing, TimeSharing
from xcore.specs.cluster_plan import PlannedModel, Share
from xcore.specs.iteration_profile import IterationProfile
from xcore.specs.model import activation_bytes
from xcore.specs.profile import Profile
from xcore.specs.schedule import Schedule
from xcore.specs.workload import RequestLengths
from xmulti.sharing.iteration_cost import IterationCost, ProfileCost, TableCost, sharing_overhead
from xmulti.sharing.plan_order import PlanOrder
from xmulti.sharing.replay import ModelLoad
from xsimulator.cost.batch_one_latency import batch_one_times
from xsimulator.cost.cost_model import ReplicaCost

CONTENTION = 1.0
"""Factor by which iterations take longer during another model's: 1, since for most models it hasn't been measured."""
SAMPLES = 500
"""Number of requests from which a service's time alone is estimated."""

AnyProfile = Profile | IterationProfile
"""A profile of a model's layers, or of its complete iterations.

With the latter, models with separate devices run prompts and decoding separately too.
"""


def rule_of(share: Share) -> Sharing:
    """Return the rule that decides which of a unit's models runs next."""
    if share.by == "priority":
        return PrioritySharing(prompts_first=True)
    return TimeSharing(in_order=share.pool == "merged") if share.by == "time" else SpatialSharing()


def overhead_of(unit: Items[PlannedModel], profiles: Mapping[str, AnyProfile]) -> float:
    """Return the factor by which iterations take longer because the models' caches share one memory.

    This is the published factor, unless the machine was measured: then it is the largest measured factor of the models,
    and the time of a switch is added at every switch.
    """
    measured = [p for model in unit if isinstance(p := profiles[model.name], Profile) and p.switch]
    if len(measured) == len(unit):
        return max(profile.merged_blocks or 1.0 for profile in measured) if unit[0].share else 1.0
    merged = unit[0].share is not None and unit[0].share.pool == "merged"
    schedules = [model.schedule for model in unit] if merged else []
    return sharing_overhead([block_of(s.model.spec, s.block_size, s.kv_dtype)[0] for s in schedules])


def loads_of(
    unit: Items[PlannedModel],
    profiles: Mapping[str, AnyProfile],
    requests: Mapping[str, Items[RequestLengths]],
    order: PlanOrder | None = None,
) -> list[ModelLoad]:
    """Return the loads of models that share devices, each with its pool.

    A model that isn't in `requests` has no requests. `order` None: that of the plan's method.
    """
    _, pools = shared_pools([model.schedule for model in unit], unit[0].share.pool if unit[0].share else "quotas")
    read = [_read_bytes(model.schedule) for model in unit]
    return [
        _load(model, pool, profiles[model.name], requests.get(model.name, ()), sum(read) - own, order)
        for model, pool, own in zip(unit, pools, read, strict=True)
    ]


def _read_bytes(schedule: Schedule) -> float:
    """Return the bytes of weights that an iteration reads on each device: the head is not split."""
    spec, tp = schedule.model.spec, schedule.stages[0].tp
    head = spec.vocab * spec.hidden * activation_bytes(schedule.dtype)
    return head + spec.layers * spec.layer_bytes(tp, schedule.dtype)


def _load(
    model: PlannedModel,
    pool: KVPool,
    profile: AnyProfile,
    requests: Items[RequestLengths],
    other_bytes: float,
    asked: PlanOrder | None,
) -> ModelLoad:
    cost, (order, known) = _cost(model.schedule, profile), order_of(model, profile, asked)
    limits = OnePhasePolicy.of(model.schedule, model.share.decode if model.share else 1.0)
    least = least_quota(model.schedule) if model.share and model.share.pool == "quotas" else None
    in_turn = model.share is not None and model.share.by != "space"
    switch_s, front_end_s = 0.0, profile.front_end_s if isinstance(profile, Profile) else 0.0
    if in_turn and isinstance(profile, Profile):
        switch_s = profile.switch_seconds(other_bytes, model.schedule.stages[0].tp)
    hints = asked.hints(model.name, requests) if asked else (known,) * len(requests) if known else ()
    return ModelLoad(model.name, cost, requests, pool, limits, order, hints, least, switch_s, front_end_s)


def _cost(schedule: Schedule, profile: AnyProfile) -> IterationCost:
    if isinstance(profile, Profile):
        return ProfileCost(ReplicaCost.of(schedule, profile))
    if schedule.policy != orca.TRAITS.name or len(schedule.stages) > 1 or schedule.replicas > 1:
        raise InputError(
            f"The iterations of {profile.model} are for either prefill or decode on one group of devices, but its "
            f"schedule has policy '{schedule.policy}', {len(schedule.stages)} stages and {schedule.replicas} "
            "replicas: replay it with a profile of layers."
        )
    return TableCost(profile, schedule.stages[0].tp)


def order_of(model: PlannedModel, profile: AnyProfile, asked: PlanOrder | None = None) -> tuple[Order, Hints | None]:
    """Return the model's order, and its hints if all its requests have the same (None: they don't).

    `asked` None: the order of the plan's method.
    """
    if asked:
        return asked.of(model), None
    if model.share is None or model.share.by != "priority":
        return fcfs, None
    if not isinstance(profile, Profile):
        raise InputError(f"Model '{model.name}' shares by priority: replay it with a profile of layers.")
    times = service_times(model.schedule, ReplicaCost.of(model.schedule, profile))
    known = Hints(service=model.name, service_time_s=float(times.mean()), service_sd_s=float(times.std()))
    return DoublingBudget(executed=True), known


def service_times(schedule: Schedule, replica: ReplicaCost) -> NDArray[np.float64]:
    """Return the seconds that requests of a schedule's workload take alone [`SAMPLES`]: L̂ is their mean."""
    drawn = schedule.workload.draw(SAMPLES, 0, schedule.model.spec.longest_request)
    return batch_one_times(replica, [r.input for r in drawn], [r.output for r in drawn]).total
