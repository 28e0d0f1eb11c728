"""Plans in which models share devices: MuxServe's placement on shares of the multiprocessors, or taking turns;
SeaLLM's, by the priorities of requests.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from exegpt.app.models_file import Demand
from exegpt.app.plan_evaluation import requests_at
from exegpt.cluster import ClusterSpec
from exegpt.errors import Infeasible, InputError
from exegpt.plan import PlannedModel, Share
from exegpt.schedule import BLOCK_SIZE, ModelReference, ProfileReference, Schedule, Stage
from exegpt.served import latencies, summarise

if TYPE_CHECKING:
    from xscheduler.multimodel.placement import Mesh, Placer, Popular
    from xscheduler.multimodel.two_stage import Outcome
    from xsimulator.cost.replica import ReplicaCost

Way = Literal["space", "time", "priority"]
"""How models share devices, as `Share.by`."""
MAX_NUM_SEQS = 256
PREFILL_TOKENS = 2048
"""Of prompts that are computed together."""
SCORED = 100
"""Requests of each model that a placement is scored by."""
SLO = 5.0
"""Times its mean time alone: the bound of a model without one, for the placement."""


def place_together(
    demands: Sequence[Demand],
    cluster: ClusterSpec,
    by: Way,
    progress: Callable[[int, int], None],
) -> list[PlannedModel]:
    """MuxServe's placement of models with rates, or SeaLLM's where they share by priority, in which each model is once.
    InputError for a model without a rate, or one that can't share; Infeasible where no placement has room for all.
    """
    from xscheduler.multimodel.placement import Placer

    popular = [_popular(demand, cluster) for demand in demands]
    other = max(_replica(demand, cluster, 1)[1] for demand in demands)
    placer = Placer(cluster.device.memory_bytes * cluster.memory_fraction, other)
    by_name = {demand.name: demand for demand in demands}
    if by == "priority":
        meshes = _placed_in_stages(popular, by_name, cluster, placer, progress)
    else:
        placement = placer.place(popular, cluster.nodes, cluster.devices_per_node, progress)
        meshes = placement.meshes if placement else None
    if meshes is None:
        needed = sum(model.weight_bytes for model in popular) / 1e9
        raise Infeasible(
            f"The models don't fit {cluster.name} together: their weights alone have {needed:,.0f} GB; "
            "name more devices, or fewer models.",
            None,
        )
    planned = {
        model.name: model for mesh in meshes for model in _planned(mesh, placer.kv_bytes(mesh), by_name, cluster, by)
    }
    return [planned[demand.name] for demand in demands]


def _placed_in_stages(
    popular: "list[Popular]",
    demands: dict[str, Demand],
    cluster: ClusterSpec,
    placer: "Placer",
    progress: Callable[[int, int], None],
) -> "tuple[Mesh, ...] | None":
    """SeaLLM's placement; None where it has no room for all."""
    from xscheduler.multimodel.placement import Mesh, Occupant
    from xscheduler.multimodel.two_stage import Group, Outcome, Service, place_in_stages
    from xsimulator.multimodel.merged import merged_blocks

    by_name = {model.name: model for model in popular}

    def mesh_of(devices: tuple[int, ...], names: tuple[str, ...]) -> Mesh | None:
        costs = [by_name[name].cost(len(devices)) for name in names]
        occupants = [Occupant(by_name[name], len(devices), 1.0, c) for name, c in zip(names, costs, strict=True) if c]
        return Mesh(devices, tuple(occupants)) if len(occupants) == len(names) else None

    def fits(devices: int, names: tuple[str, ...]) -> bool:
        mesh = mesh_of(tuple(range(devices)), names)
        if mesh is None:
            return False
        sizes = [math.ceil(BLOCK_SIZE * by_name[name].kv_token_bytes) for name in names]
        longest = [by_name[name].longest // BLOCK_SIZE for name in names]
        return merged_blocks(placer.kv_bytes(mesh), sizes, longest) is not None

    @functools.cache
    def outcomes(devices: int, names: tuple[str, ...]) -> dict[str, Outcome]:
        mesh = mesh_of(tuple(range(devices)), names)
        assert mesh is not None, "they fit"
        return _outcomes(_planned(mesh, placer.kv_bytes(mesh), demands, cluster, "priority"), demands)

    def score(groups: tuple[Group, ...]) -> dict[str, Outcome]:
        return {n: o for g in groups if g.services for n, o in outcomes(len(g.devices), g.services).items()}

    services = [Service(model.name, model.rate_seq_s, SCORED) for model in popular]
    nodes = (cluster.nodes, cluster.devices_per_node)
    placed = place_in_stages(services, *nodes, fits, score, replicas=False, progress=progress)
    if placed is None:
        return None
    meshes = [mesh_of(group.devices, group.services) for group in placed.groups if group.services]
    return tuple(mesh for mesh in meshes if mesh)


def _outcomes(unit: list[PlannedModel], demands: dict[str, Demand]) -> "dict[str, Outcome]":
    """What short replays of a unit's models say: who is later than its bound, or than five times its time alone."""
    from xscheduler.multimodel.two_stage import Outcome
    from xsimulator.cost.replica import ReplicaCost
    from xsimulator.multimodel.plan_replay import replay_models, service_times

    profiles = {model.name: demands[model.name].setting.profile for model in unit}
    requests = {model.name: requests_at(demands[model.name], SCORED, 1.0) for model in unit}
    found = {}
    for name, replay in replay_models(unit, profiles, requests).items():
        schedule = next(model.schedule for model in unit if model.name == name)
        mean_s = float(service_times(schedule, ReplicaCost.of(schedule, profiles[name])).mean())
        bound_s = demands[name].bound_s or SLO * mean_s
        waited = latencies(replay.served, "arrival")["latency"]
        found[name] = Outcome(int((waited > bound_s).sum()), float(waited.mean()) / mean_s, len(waited))
    return found


def _popular(demand: Demand, cluster: ClusterSpec) -> "Popular":
    from xscheduler.multimodel.placement import Popular
    from xsimulator.multimodel.iteration_cost import IterationCost, ProfileCost

    model, lengths = demand.setting.model, demand.setting.workload
    if demand.rate_seq_s is None or model.encoder_layers:
        why = "no rate" if demand.rate_seq_s is None else "an encoder"
        raise InputError(f"Model '{demand.name}' has {why}, and can't share devices: use --method exegpt.")
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


def _replica(demand: Demand, cluster: ClusterSpec, tp: int) -> tuple[float, float]:
    """Bytes of a model's weights, and what it needs of a device beside them and its cache."""
    from xsimulator.cost.memory import RESERVE_BYTES

    (memory,) = _replica_cost(demand, cluster, tp).memory(PREFILL_TOKENS)
    return memory.weights, memory.workspace + RESERVE_BYTES


def _stages(demand: Demand, tp: int) -> tuple[Stage, ...]:
    return (Stage(tuple(range(tp)), tp, "both", None, (0, demand.setting.model.layers)),)


def _replica_cost(demand: Demand, cluster: ClusterSpec, tp: int) -> "ReplicaCost":
    from xsimulator.cost.replica import CostModel

    setting = demand.setting
    return CostModel(setting.model, cluster, setting.profile, setting.kv_dtype).replica(_stages(demand, tp))


def _planned(
    mesh: "Mesh", kv_bytes: float, demands: dict[str, Demand], cluster: ClusterSpec, by: Way
) -> list[PlannedModel]:
    """The models of a mesh, each with room for its longest sequence, and the rest of the cache in proportion to rates
    and sizes (MuxServe's quotas).
    """
    wanted = sum(o.popular.rate_seq_s * o.popular.kv_token_bytes for o in mesh.occupants)
    rest = kv_bytes - sum(o.popular.least_bytes for o in mesh.occupants)
    alone, planned = len(mesh.occupants) == 1, []
    for occupant in mesh.occupants:
        popular, demand = occupant.popular, demands[occupant.popular.name]
        part = popular.least_bytes + rest * popular.rate_seq_s * popular.kv_token_bytes / wanted
        blocks = math.floor(part / (BLOCK_SIZE * popular.kv_token_bytes))
        schedule = _schedule(demand, cluster, len(mesh.devices), blocks)
        pool: Literal["quotas", "merged"] = "merged" if by == "priority" else "quotas"
        share = None if alone else Share(by, occupant.decode_share if by == "space" else 1.0, pool)
        unknown = summarise((), 0.0, "p99-queries")
        planned.append(PlannedModel(popular.name, mesh.devices, schedule, unknown, demand.rate_seq_s, share=share))
    return planned


def _schedule(demand: Demand, cluster: ClusterSpec, tp: int, blocks: int) -> Schedule:
    setting = demand.setting
    prompts = max(1, round(PREFILL_TOKENS / setting.workload.input.mean))
    part = replace(cluster, name=f"{tp}x{cluster.device.kind}", nodes=1, devices_per_node=tp)
    return Schedule(
        version=Schedule.VERSION,
        policy="orca",
        model=ModelReference(setting.model, setting.model.fingerprint),
        cluster=part,
        workload=setting.workload.without_requests,
        profile=ProfileReference(setting.profile.source, setting.profile.fingerprint),
        stages=_stages(demand, tp),
        kv_blocks=blocks,
        dtype=setting.profile.dtype,
        kv_dtype=setting.kv_dtype,
        admission="grow",
        max_num_seqs=MAX_NUM_SEQS,
        prefills_per_step=min(prompts, MAX_NUM_SEQS),
        latency_bound_s=demand.bound_s,
    )
