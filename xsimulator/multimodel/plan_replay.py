"""Requests of several models through a plan: models with devices of their own, and units that share theirs."""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from exegpt.batching import Hints, deal
from exegpt.batching.kv_pool import KVPool
from exegpt.batching.shared_pool import QuotaPool, Store, block_of, merged_pools
from exegpt.orders.doubling_budget import DoublingBudget
from exegpt.plan import Plan, PlannedModel, Share
from exegpt.policies.one_phase import OnePhasePolicy
from exegpt.policies.priority_sharing import PrioritySharing
from exegpt.policies.sharing import Sharing, SpatialSharing, TimeSharing
from exegpt.profile import Profile
from exegpt.schedule import Schedule
from exegpt.served import Served, ServedColumns
from exegpt.timeline import Span
from exegpt.workload import RequestLengths
from xsimulator.cost.replica import ReplicaCost
from xsimulator.cost.solo import solo_times
from xsimulator.multimodel.iteration_cost import ProfileCost, sharing_overhead
from xsimulator.multimodel.replay import Load, replay_unit
from xsimulator.multimodel.tenant import Limits
from xsimulator.replay.compiled import Replicas, Requests
from xsimulator.replay.event_simulator import replay

CONTENTION = 1.0
"""How much longer iterations take beside another model's: nothing, as nobody has measured it for most models."""
SAMPLES = 500
"""Requests by which a service's time alone is known."""


@dataclass(frozen=True)
class ModelReplay:
    """What one model's requests experienced."""

    served: tuple[Served, ...]
    """In order of completion."""
    preemptions: int
    spans: tuple[Span, ...] = ()
    """Numbered by the plan's devices; where they were not asked for none."""


def replay_plan(
    plan: Plan,
    profiles: Mapping[str, Profile],
    requests: Mapping[str, Items[RequestLengths]],
    timeline: bool = False,
) -> dict[str, ModelReplay]:
    """Run every model's requests through a plan; profiles and requests by the models' names, which may be some of the
    plan's. InputError for a request that a model's cache could not hold.
    """
    replays: dict[str, ModelReplay] = {}
    for unit in plan.units:
        asked = [model for model in unit if model.name in requests]
        replays |= replay_models(asked, profiles, requests, timeline) if asked else {}
    return replays


def replay_models(
    unit: Items[PlannedModel],
    profiles: Mapping[str, Profile],
    requests: Mapping[str, Items[RequestLengths]],
    timeline: bool = False,
) -> dict[str, ModelReplay]:
    """Those of models that share devices, or of one alone."""
    share = unit[0].share
    if share is None:
        (model,) = unit
        run = replay(model.schedule, profiles[model.name], requests[model.name], timeline=timeline)
        return {model.name: ModelReplay(run.served, run.preemptions, _moved(run.timeline.spans, model))}
    loads = [
        _load(model, pool, profiles[model.name], requests[model.name])
        for model, pool in zip(unit, _pools(unit), strict=True)
    ]
    run_of_unit = replay_unit(loads, _rule(share), CONTENTION, timeline, overhead=_overhead(unit))
    spans = {model.name: [s for s in run_of_unit.spans if s.stage == place] for place, model in enumerate(unit)}
    return {
        model.name: ModelReplay(
            run_of_unit.served[model.name],
            run_of_unit.preemptions[model.name],
            _moved(spans[model.name], model),
        )
        for model in unit
    }


def _rule(share: Share) -> Sharing:
    if share.by == "priority":
        return PrioritySharing(prompts_first=True)
    return TimeSharing(in_order=share.pool == "merged") if share.by == "time" else SpatialSharing()


def _overhead(unit: Items[PlannedModel]) -> float:
    """How much longer iterations take because the models' caches lie in one memory."""
    assert unit[0].share is not None, "they share their devices"
    schedules = [model.schedule for model in unit] if unit[0].share.pool == "merged" else []
    return sharing_overhead([block_of(s.model.spec, s.block_size, s.kv_dtype)[0] for s in schedules])


def replay_alone(schedule: Schedule, profile: Profile, requests: Items[RequestLengths]) -> ServedColumns:
    """What requests experience under a schedule with devices of its own, as `replay` would find it and many times as
    quick; in no order. InputError as there.
    """
    if schedule.admission != "reserve" or schedule.prefix_caching:  # isn't compiled
        return ServedColumns.of(replay(schedule, profile, requests, timeline=False).served)
    lengths = [(request.input, request.output) for request in requests]
    columns = np.array([(r.arrival_s, r.input, r.output) for r in requests], dtype=np.float64)
    replicas, served = Replicas(profile), []
    for places in deal(lengths, schedule.replicas):
        if not places:
            continue
        arrivals, inputs, outputs = np.ascontiguousarray(columns[places].T)
        times = replicas.serve(schedule, Requests(arrivals, inputs, outputs, np.zeros(len(places))))
        assert times is not None, "no bound ends it"
        served.append((outputs, arrivals, times.started, times.first, times.finished))
    return ServedColumns(*map(np.concatenate, zip(*served, strict=True)))


def _load(model: PlannedModel, pool: KVPool, profile: Profile, requests: Items[RequestLengths]) -> Load:
    schedule, share, policy = model.schedule, model.share, OnePhasePolicy.of(model.schedule)
    assert share is not None, "it shares its devices"
    limits = Limits(policy.max_num_seqs, policy.max_num_batched_tokens, decode_share=share.decode)
    replica = ReplicaCost.of(schedule, profile)
    load = Load(model.name, ProfileCost(replica), requests, pool, limits)
    if share.by != "priority":
        return load
    times = service_times(schedule, replica)
    known = Hints(service=model.name, service_time_s=float(times.mean()), service_sd_s=float(times.std()))
    return replace(load, order=DoublingBudget(executed=True), hints=(known,) * len(requests))


def service_times(schedule: Schedule, replica: ReplicaCost) -> NDArray[np.float64]:
    """Seconds that requests of a schedule's workload take alone [`SAMPLES`]: L̂ is their mean."""
    drawn = schedule.workload.draw(SAMPLES, 0, schedule.model.spec.context)
    return solo_times(replica, [r.input for r in drawn], [r.output for r in drawn]).total


def _pools(unit: Items[PlannedModel]) -> Items[KVPool]:
    """Each model's pool of the memory that their schedules' KV blocks come to together."""
    assert unit[0].share is not None, "they share their devices"
    if unit[0].share.pool == "merged":
        return merged_pools([model.schedule for model in unit])[1]
    store = Store(sum(model.schedule.kv_blocks * _parts(model) for model in unit))
    return [
        QuotaPool(store, _parts(model), model.schedule.block_size, model.schedule.kv_blocks * _parts(model))
        for model in unit
    ]


def _parts(model: PlannedModel) -> int:
    """Head-wise parts of one of its KV blocks."""
    spec = model.schedule.model.spec
    return spec.layers * spec.kv_heads


def _moved(spans: Items[Span], model: PlannedModel) -> tuple[Span, ...]:
    """Spans on the plan's devices."""
    where = model.devices
    return tuple(
        Span(where[s.device], s.stage, s.phase, s.micro_batch, s.start_s, s.end_s, s.sequences, s.tokens) for s in spans
    )
