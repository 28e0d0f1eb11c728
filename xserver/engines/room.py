"""Enlarge the KV pools in schedules so that a restarted engine can continue all accepted requests."""

from collections.abc import Mapping
from dataclasses import replace

from xcore.batching.kv_capacity import grow_to_fit
from xcore.batching.shared_pool import merged_pools
from xcore.spec import Spec
from xcore.specs.cluster_plan import Plan
from xcore.specs.schedule import Schedule
from xserver.engines.engine_link import EngineLink


def with_room_for(links: Mapping[str, EngineLink], noun: Spec) -> Spec:
    """Return a schedule or a plan with at least the KV blocks that each unanswered request needs.

    The schedule is that of the only one of `links`; the plan contains the models of `links`. Requests have been
    accepted, but the schedule may be for shorter ones.
    """
    if isinstance(noun, Schedule):
        (link,) = links.values()
        return _with_room(noun, link)
    return _plan_with_room(noun, links) if isinstance(noun, Plan) else noun


def _plan_with_room(plan: Plan, links: Mapping[str, EngineLink]) -> Plan:
    ours = [model for model in plan.models if model.name in links]
    have = [model.schedule.kv_blocks for model in ours]
    if ours[0].share and ours[0].share.pool == "merged":  # one request may use the blocks of all models
        have = [pool.total for pool in merged_pools([model.schedule for model in ours])[1]]
    models = dict(zip((model.name for model in plan.models), plan.models, strict=True))
    for model, blocks in zip(ours, have, strict=True):
        schedule = _with_room(model.schedule, links[model.name])
        if schedule.kv_blocks > blocks:
            models[model.name] = replace(model, schedule=schedule)
    return replace(plan, models=tuple(models.values()))


def _with_room(schedule: Schedule, link: EngineLink) -> Schedule:
    return grow_to_fit(schedule, [output.request for output in link.outputs.values()])
