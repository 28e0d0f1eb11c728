"""Requests of several models through a plan: models with devices of their own, and units that share theirs."""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Literal

import numpy as np

from exegpt.batching import deal
from exegpt.batching.kv_pool import KVPool
from exegpt.batching.shared_pool import QuotaPool, Store, merged_pools
from exegpt.plan import Plan, PlannedModel
from exegpt.policies.one_phase import OnePhasePolicy
from exegpt.policies.sharing import Sharing, TimeSharing
from exegpt.profile import Profile
from exegpt.schedule import Schedule
from exegpt.served import Served, ServedColumns
from exegpt.timeline import Span
from exegpt.workload import RequestLengths
from xsimulator.cost.replica import ReplicaCost
from xsimulator.multimodel.iteration_cost import ProfileCost
from xsimulator.multimodel.replay import Load, replay_unit
from xsimulator.multimodel.tenant import Limits
from xsimulator.replay.compiled import Replicas, Requests
from xsimulator.replay.event_simulator import replay

CONTENTION = 1.0
"""How much longer iterations take beside another model's: nothing, as nobody has measured it for most models."""


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
    rule: Sharing | Literal["space", "time", "priority"] = share.by
    if share.by == "time":
        rule = TimeSharing(in_order=share.pool == "merged")
    run_of_unit = replay_unit(loads, rule, CONTENTION, timeline)
    spans = {model.name: [s for s in run_of_unit.spans if s.stage == place] for place, model in enumerate(unit)}
    return {
        model.name: ModelReplay(
            run_of_unit.served[model.name],
            run_of_unit.preemptions[model.name],
            _moved(spans[model.name], model),
        )
        for model in unit
    }


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
    schedule, policy = model.schedule, OnePhasePolicy.of(model.schedule)
    assert model.share is not None, "it shares its devices"
    limits = Limits(policy.max_num_seqs, policy.max_num_batched_tokens, decode_share=model.share.decode)
    return Load(model.name, ProfileCost(ReplicaCost.of(schedule, profile)), requests, pool, limits)


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
