"""The divisions of a mixture's experts among devices, which a search compares.

Each device of a tensor-parallel group has a part of every expert, or whole experts (expert parallelism). Or groups of
devices share the experts, and each device has attention for its own sequences (attention data parallelism). Which is
faster depends on the batches and the links, often by a factor of two.
"""

from collections.abc import Iterator
from dataclasses import replace

from xcore.specs.cluster import ClusterSpec
from xcore.specs.deployment import Deployment
from xcore.specs.model import ModelSpec
from xcore.specs.schedule import Schedule
from xprofiler.rooflines import accuracy, like
from xscheduler.search_problem import Division
from xscheduler.settings import Setting, split_text, with_experts


def with_divisions(setting: Setting) -> Setting:
    """Return the setting whose searches try all divisions, if its model has experts and its profile is a roofline."""
    undivided = setting.model.experts is None or setting.cluster.devices == 1 or setting.cluster.is_cpu
    if undivided or setting.profile.source != "roofline":
        return setting
    dividing, parts = replace(setting, divides=True), split_text(setting.model, setting.profile)
    others = list(_models(dividing))
    shared = [str(model.attention_dp) for model in others if model.attention_dp > 1]
    ways = ["a part of each on every device"] if parts.startswith("a part") else []
    ways += ["whole ones (EP)"] if len(others) > len(shared) or not ways else []
    ways += [f"groups of {', '.join(shared)} devices that share them (attention DP)"] if shared else []
    searched = f"the search tries {', '.join(ways)}; --expert-parallel or --attention-dp N (1: parts) chooses one"
    texts = (text.replace(parts, searched) if text.startswith("experts: ") else text for text in setting.assumptions)
    return replace(dividing, assumptions=tuple(text for text in texts if not text.startswith("latent attention: ")))


def divided(setting: Setting) -> list[Setting]:
    """Return the setting with each division that its searches try, its present one first."""
    present = replace(setting, divides=False)
    return [present, *(_as(present, model) for model in _models(setting))]


def divisions(setting: Setting) -> tuple[Division, ...]:
    """Return the other divisions that a setting's searches try, with their times."""
    others = divided(setting)[1:]
    return tuple(Division(other.model, Deployment(other.cluster, other.profile), other.own) for other in others)


def divided_as(setting: Setting, schedule: Schedule | None) -> Setting:
    """Return the setting with the division of a schedule, which its search has returned, and no other."""
    if schedule is None or not setting.divides:
        return setting
    setting = replace(setting, divides=False)
    if schedule.model.spec.experts == setting.model.experts:
        return setting
    return _as(setting, replace(setting.model, experts=schedule.model.spec.experts))


def _models(setting: Setting) -> Iterator[ModelSpec]:
    """Yield the model with the other divisions that the devices allow."""
    experts, cluster, dtype = setting.model.experts, setting.cluster, setting.profile.dtype
    if experts is None or not setting.divides:
        return
    whole, degrees = with_experts(setting.model, True, None), [degree.tp for degree in setting.profile.degrees]
    if any(whole.expert_parallel(tp, dtype) != setting.model.expert_parallel(tp, dtype) for tp in degrees):
        yield whole
    for shared in _groups(cluster):
        if experts.count % shared == 0:
            yield with_experts(setting.model, False, shared)


def _groups(cluster: ClusterSpec) -> list[int]:
    """Return the numbers of devices that may share experts: equal parts of a node, a node, or all nodes."""
    per_node = cluster.devices_per_node
    parts = [devices for devices in range(2, per_node + 1) if per_node % devices == 0]
    return parts + ([cluster.devices] if cluster.nodes > 1 else [])


def _as(setting: Setting, model: ModelSpec) -> Setting:
    """Return the setting of a model with another division, with its times and what is known of their accuracy."""
    profile = replace(like(setting.profile, model, setting.cluster), draft=setting.profile.draft)
    own = setting.own
    if own:
        own = replace(own, profile=replace(like(own.profile, model, own.cluster), draft=own.profile.draft))
    before = accuracy(setting.profile, setting.cluster, setting.model)
    kept = tuple(text for text in setting.assumptions if text not in before)
    texts = (*kept, *accuracy(profile, setting.cluster, model))
    return replace(setting, model=model, profile=profile, own=own, assumptions=texts)
