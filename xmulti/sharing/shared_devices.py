"""Plans in which models share devices: MuxServe's placement on shares of the multiprocessors, or with turns."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from xcore.errors import Infeasible, InputError
from xcore.policies import orca
from xcore.quantity import counted, figure_text
from xcore.specs.cluster import ClusterSpec
from xcore.specs.cluster_plan import PlannedModel, Share
from xcore.specs.engine_spec import engine_of
from xcore.specs.request_times import summarise
from xcore.specs.schedule import BLOCK_SIZE, ModelReference, ProfileReference, Schedule, Stage
from xmulti.plans.demands import ModelDemand

if TYPE_CHECKING:
    from xmulti.sharing.placement import Mesh, Popular
    from xsimulator.cost.cost_model import ReplicaCost

MAX_NUM_SEQS = 256
PREFILL_TOKENS = 2048
"""Tokens of prompts that are prefilled together."""


def place_together(
    demands: Sequence[ModelDemand],
    cluster: ClusterSpec,
    by: Literal["space", "time"],
    progress: Callable[[int, int], None],
) -> list[PlannedModel]:
    """Return MuxServe's placement of models with rates; nothing is replayed yet.

    Models that are to share by space take turns on meshes where they can't run at the same time.

    Raises:
        InputError: A model has no rate, or can't share.
        Infeasible: No placement has room for all.
    """
    from xmulti.sharing.placement import Placer

    popular = [popular_of(demand, cluster) for demand in demands]
    placer = Placer(usable_bytes(demands, cluster), other_bytes(demands, cluster))
    placement = placer.place(popular, cluster.nodes, cluster.devices_per_node, progress)
    if placement is None:
        raise no_room_together(demands, cluster)
    by_name = {demand.name: demand for demand in demands}
    planned = {
        model.name: model
        for mesh in placement.meshes
        for model in planned_on(mesh, placer.kv_bytes(mesh), by_name, cluster, Share(by, 1.0))
    }
    return [planned[demand.name] for demand in demands]


def no_room_together(demands: Sequence[ModelDemand], cluster: ClusterSpec) -> Infeasible:
    """Return the error that no placement has room for all models."""
    weights = figure_text(sum(popular_of(demand, cluster).weight_bytes for demand in demands) / 1e9)
    usable, other = (
        figure_text(size / 1e9) for size in (usable_bytes(demands, cluster), other_bytes(demands, cluster))
    )
    return Infeasible(
        f"The models don't fit on {cluster.name} together. Their weights take {weights} GB, and KV blocks need "
        f"more; each of {counted(cluster.devices, 'device')} has {usable} GB for models, and {other} GB of them are "
        "used for other purposes. Use more devices, a larger --gpu-memory-fraction, or fewer models.",
        None,
    )


def share_unit(
    demands: Sequence[ModelDemand], cluster: ClusterSpec, devices: int, by: Literal["space", "time"], factor: float
) -> list[PlannedModel] | None:
    """Return models that share the cluster's first devices; None if they have no room, or can't share in this way.

    Their shares are wide enough for their rates times `factor`. Nothing is replayed yet.
    """
    from xmulti.sharing.placement import MOST_SHARES, Placer

    if by == "space" and not run_at_once(cluster, devices):
        return None
    placer = Placer(usable_bytes(demands, cluster), other_bytes(demands, cluster))
    popular = [popular_of(demand, cluster) for demand in demands]
    raised = [replace(model, rate_seq_s=factor * model.rate_seq_s) for model in popular]
    mesh = placer.unit(raised, tuple(range(devices)), math.inf if by == "time" else MOST_SHARES)
    if mesh is None:
        return None
    by_name = {demand.name: demand for demand in demands}
    return planned_on(mesh, placer.kv_bytes(mesh), by_name, cluster, Share(by, 1.0))


def most_of_unit(demands: Sequence[ModelDemand], cluster: ClusterSpec, devices: int) -> float:
    """Return the factor of all rates that models can't exceed on one mesh; 0 if they have no room on it."""
    from xmulti.sharing.fluid_bound import highest_factor
    from xmulti.sharing.placement import Mesh, Occupant, Placer

    placer = Placer(usable_bytes(demands, cluster), other_bytes(demands, cluster))
    popular = [popular_of(demand, cluster) for demand in demands]
    costs = [model.cost(devices) for model in popular]
    occupants = tuple(Occupant(m, devices, 1.0, cost) for m, cost in zip(popular, costs, strict=True) if cost)
    if len(occupants) < len(popular):
        return 0.0
    kv_bytes = placer.kv_bytes(Mesh(tuple(range(devices)), occupants))
    return highest_factor(popular, [demand.bound_s for demand in demands], devices, kv_bytes, PREFILL_TOKENS)


def run_at_once(cluster: ClusterSpec, devices: int) -> bool:
    """Return whether models on these devices can run at the same time, each on its share of the multiprocessors.

    Green contexts divide one GPU. CPUs, and models over several GPUs, take turns.
    """
    return devices == 1 and not cluster.is_cpu


def can_share(demand: ModelDemand) -> bool:
    """Return whether a model can share devices."""
    return demand.rate_seq_s is not None and not demand.setting.model.encoder_layers


def usable_bytes(demands: Sequence[ModelDemand], cluster: ClusterSpec) -> float:
    """Return the bytes of one device that models' engines may fill."""
    return min(engine_of(demand.setting.profile).memory.usable_bytes(cluster) for demand in demands)


def other_bytes(demands: Sequence[ModelDemand], cluster: ClusterSpec) -> float:
    """Return the bytes that a model needs on a device in addition to weights and cache; the maximum over all models."""
    return max(_replica(demand, cluster, 1)[1] for demand in demands)


def popular_of(demand: ModelDemand, cluster: ClusterSpec) -> "Popular":
    """Return a demand's data for placements.

    Raises:
        InputError: The model can't share devices.
    """
    from xmulti.sharing.iteration_cost import IterationCost, ProfileCost
    from xmulti.sharing.placement import Popular

    model, lengths = demand.setting.model, demand.setting.workload
    if demand.rate_seq_s is None or model.encoder_layers:
        why = "no rate" if demand.rate_seq_s is None else "an encoder"
        raise InputError(f"Model '{demand.name}' has {why}, so it can't share devices: use --method exegpt.")
    weights, _ = _replica(demand, cluster, 1)

    def cost(devices: int) -> IterationCost | None:
        degrees = {tables.tp for tables in demand.setting.profile.degrees}
        if devices not in degrees or devices not in model.tp_degrees(devices):
            return None
        return ProfileCost(_replica_cost(demand, cluster, devices))

    return Popular(
        demand.name,
        demand.rate_seq_s,
        lengths.input.mean,
        lengths.output.mean,
        demand.rate_seq_s * model.parameters,
        cost,
        weights,
        float(model.layers * model.kv_bytes(1, demand.setting.kv_dtype)),
        BLOCK_SIZE * math.ceil((lengths.input.max + lengths.output.max) / BLOCK_SIZE + 1),
    )


def _replica(demand: ModelDemand, cluster: ClusterSpec, tp: int) -> tuple[float, float]:
    """Return the bytes of a model's weights, and of its other needs on a device except its cache."""
    (memory,) = _replica_cost(demand, cluster, tp).memory((PREFILL_TOKENS, MAX_NUM_SEQS))
    return memory.weights, memory.workspace + memory.held


def _stages(demand: ModelDemand, tp: int) -> tuple[Stage, ...]:
    return (Stage(tuple(range(tp)), tp, "both", None, (0, demand.setting.model.layers)),)


def _replica_cost(demand: ModelDemand, cluster: ClusterSpec, tp: int) -> "ReplicaCost":
    from xsimulator.cost.cost_model import CostModel

    setting = demand.setting
    return CostModel(
        setting.model, cluster, setting.profile, setting.kv_dtype, tokens=setting.workload.mean_tokens
    ).replica(_stages(demand, tp))


def planned_on(
    mesh: "Mesh", kv_bytes: float, demands: dict[str, ModelDemand], cluster: ClusterSpec, share: Share
) -> list[PlannedModel]:
    """Return the models of a mesh, each with room for its longest sequence.

    The remaining cache is divided in proportion to rates and sizes (MuxServe's quotas; an estimate for merged blocks),
    at most what a model's sequences use. `share`: how several models share. By space, each decodes on its own share of
    the multiprocessors; where that can't be, the models take turns.
    """
    wanted = sum(o.popular.rate_seq_s * o.popular.kv_token_bytes for o in mesh.occupants)
    rest = kv_bytes - sum(o.popular.least_bytes for o in mesh.occupants)
    alone, planned = len(mesh.occupants) == 1, []
    if share.by == "space" and not run_at_once(cluster, len(mesh.devices)):
        share = replace(share, by="time")
    for occupant in mesh.occupants:
        popular, demand = occupant.popular, demands[occupant.popular.name]
        part = popular.least_bytes + rest * popular.rate_seq_s * popular.kv_token_bytes / wanted
        part = min(part, MAX_NUM_SEQS * popular.least_bytes)
        blocks = math.floor(part / (BLOCK_SIZE * popular.kv_token_bytes))
        schedule = _schedule(demand, cluster, len(mesh.devices), blocks)
        own = replace(share, decode=occupant.decode_share) if share.by == "space" else share
        unknown = summarise((), 0.0)
        planned.append(
            PlannedModel(popular.name, mesh.devices, schedule, unknown, demand.rate_seq_s, share=None if alone else own)
        )
    return planned


def _schedule(demand: ModelDemand, cluster: ClusterSpec, tp: int, blocks: int) -> Schedule:
    setting = demand.setting
    prompts = max(1, round(PREFILL_TOKENS / setting.workload.input.mean))
    part = replace(cluster, name=f"{tp}x{cluster.device.kind}", nodes=1, devices_per_node=tp)
    return Schedule(
        version=Schedule.VERSION,
        policy=orca.TRAITS.name,
        control=orca.OrcaControl(max_num_seqs=MAX_NUM_SEQS, prefills_per_step=min(prompts, MAX_NUM_SEQS)),
        model=ModelReference(setting.model, setting.model.fingerprint),
        cluster=part,
        workload=setting.workload.without_requests,
        profile=ProfileReference(setting.profile.source, setting.profile.fingerprint),
        stages=_stages(demand, tp),
        kv_blocks=blocks,
        dtype=setting.profile.dtype,
        kv_dtype=setting.kv_dtype,
        admission="grow",
        latency_bound_s=demand.bound_s,
        bound="requests",
    )
