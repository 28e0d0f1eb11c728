"""Requests of several models through a plan: models with devices of their own, and units that share theirs."""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from exegpt.batching import Hints
from exegpt.batching.kv_pool import KVPool
from exegpt.batching.shared_pool import QuotaPool, Store
from exegpt.orders.doubling_budget import DoublingBudget
from exegpt.plan import Plan, PlannedModel
from exegpt.profile import Profile
from exegpt.schedule import Schedule
from exegpt.served import Served
from exegpt.timeline import Span
from exegpt.workload import RequestLengths
from xsimulator.cost.replica import ReplicaCost
from xsimulator.cost.solo import solo_times
from xsimulator.multimodel.iteration_cost import ProfileCost
from xsimulator.multimodel.merged import merged_pools, sharing_overhead
from xsimulator.multimodel.priority import PrioritySharing
from xsimulator.multimodel.replay import Load, replay_unit
from xsimulator.multimodel.tenant import Limits
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
    loads = _merged_loads(unit, profiles, requests) if share.pool == "merged" else _loads(unit, profiles, requests)
    overhead = sharing_overhead([_block_bytes(model) for model in unit]) if share.pool == "merged" else 1.0
    rule = PrioritySharing(prompts_first=True) if share.by == "priority" else share.by
    run_of_unit = replay_unit(loads, rule, CONTENTION, timeline, overhead=overhead)
    spans = {model.name: [s for s in run_of_unit.spans if s.stage == place] for place, model in enumerate(unit)}
    return {
        model.name: ModelReplay(
            run_of_unit.served[model.name],
            run_of_unit.preemptions[model.name],
            _moved(spans[model.name], model),
        )
        for model in unit
    }


def _loads(
    unit: Items[PlannedModel], profiles: Mapping[str, Profile], requests: Mapping[str, Items[RequestLengths]]
) -> list[Load]:
    """Models with quotas of their own."""
    store = Store(sum(model.schedule.kv_blocks * _parts(model) for model in unit))
    loads = []
    for model in unit:
        parts, schedule = _parts(model), model.schedule
        pool = QuotaPool(store, parts, schedule.block_size, schedule.kv_blocks * parts)
        loads.append(_load(model, pool, profiles[model.name], requests[model.name]))
    return loads


def _merged_loads(
    unit: Items[PlannedModel], profiles: Mapping[str, Profile], requests: Mapping[str, Items[RequestLengths]]
) -> list[Load]:
    """Models that all take merged blocks of the memory that their blocks are together."""
    sizes = [_block_bytes(model) for model in unit]
    memory = sum(model.schedule.kv_blocks * size for model, size in zip(unit, sizes, strict=True))
    pools = merged_pools(memory, sizes, unit[0].schedule.block_size)
    return [
        _load(model, pool, profiles[model.name], requests[model.name]) for model, pool in zip(unit, pools, strict=True)
    ]


def _load(model: PlannedModel, pool: KVPool, profile: Profile, requests: Items[RequestLengths]) -> Load:
    schedule, share = model.schedule, model.share
    assert share is not None, "it shares its devices"
    tokens = schedule.variable("prefills_per_step") * max(1, round(schedule.workload.input.mean))
    limits = Limits(schedule.variable("max_num_seqs"), tokens, decode_share=share.decode)
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


def _block_bytes(model: PlannedModel) -> int:
    """Of one of its KV blocks."""
    spec, schedule = model.schedule.model.spec, model.schedule
    return int(schedule.block_size * spec.layers * spec.kv_bytes(1, schedule.kv_dtype))


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
