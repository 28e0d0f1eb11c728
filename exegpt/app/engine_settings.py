"""A running engine's settings as the schedule that it follows."""

import bisect
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from exegpt.app.choices import admission_rule, check_choice, check_prefix_caching
from exegpt.app.settings import Setting
from exegpt.batching.admission import most_cached
from exegpt.errors import InputError
from exegpt.policies import TRAITS, checked
from exegpt.quantity import figure_text
from exegpt.report.schedule_text import stages_text
from exegpt.schedule import BLOCK_SIZE, ModelReference, ProfileReference, Schedule, Stage

if TYPE_CHECKING:
    from exegpt.cluster import ClusterSpec
    from exegpt.profile import Profile


_USUAL = {"max_num_batched_tokens": 2048, "prefills_per_step": 1}
"""What an engine's variables are where its settings don't say."""


@dataclass(frozen=True)
class EngineSettings:
    """A running engine's settings; None: not given."""

    policy: str | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    prefills_per_step: int | None = None
    tp_degree: int | None = None
    replicas: int | None = None
    kv_blocks: int | None = None
    block_size: int | None = None
    admission: str | None = None
    prefix_caching: bool = False


def follow(setting: Setting, settings: EngineSettings) -> tuple[Schedule, tuple[str, ...]]:
    """The schedule that a running engine follows with these settings, and what was assumed.

    InputError for a setting that its policy doesn't have.
    """
    policy = settings.policy or "chunked"
    check_choice(policy, tuple(TRAITS), "--policy")
    if settings.prefix_caching:
        check_prefix_caching(policy, setting.model)
    engines = [name for name, traits in TRAITS.items() if traits.engines]
    if policy not in engines:
        raise InputError(
            f"--policy '{policy}' isn't an engine's: use {' or '.join(engines)}, or pass a schedule with --schedule."
        )
    admission = admission_rule(settings.admission, policy)
    variables = {}
    for name, usual in _USUAL.items():
        value = getattr(settings, name)
        if name in TRAITS[policy].variables:
            variables[name] = value or usual
        elif value is not None:
            option = f"--{name.replace('_', '-')}"
            raise InputError(f"Policy {policy} has no {option}: leave {option} {value} out.")
    replicas = settings.replicas or 1
    tp_degree = settings.tp_degree or _usual_degree(setting, replicas)
    most, assumed = settings.max_num_seqs, []
    if most is None:
        wide = _usual_residents(setting.cluster)
        most = min(wide, variables.get("max_num_batched_tokens", wide))
        why = f"vLLM's default on {setting.cluster.device.kind}" if most == wide else "one per token of the budget"
        assumed.append(f"max_num_seqs: {most:,}, {why}")
    block_size = settings.block_size or BLOCK_SIZE
    variables["max_num_seqs"] = most
    schedule = engine_schedule(setting, policy, tp_degree, settings.kv_blocks, block_size, replicas, **variables)
    schedule = replace(schedule, admission=admission, prefix_caching=settings.prefix_caching)
    if not settings.tp_degree and setting.cluster.devices > replicas:
        widest = f"{stages_text(schedule)}, as wide as the model and a node allow"
        assumed.append(f"tensor parallelism: {widest}; --tp-degree takes another degree, --replicas copies")
    return schedule, tuple(assumed)


def _usual_residents(cluster: "ClusterSpec") -> int:
    """What `vllm serve` 0.33 takes for --max-num-seqs by itself: more from 70 GiB on, but for the A100."""
    return 1024 if cluster.device.memory_bytes >= 70 * 2**30 and "A100" not in cluster.device.kind else 256


def _usual_degree(setting: Setting, replicas: int) -> int:
    """The tensor-parallel degree that engines are usually started with: the widest within a node that the model and the
    profile have.
    """
    from xscheduler.allocation import tp_degrees

    known = {degree.tp for degree in setting.profile.degrees}
    fit = tp_degrees(setting.model, _part(setting.cluster, replicas))
    return max((tp for tp in fit if tp in known), default=1)


def engine_schedule(
    setting: Setting,
    policy: str,
    tp_degree: int,
    kv_blocks: int | None,
    block_size: int,
    replicas: int = 1,
    **variables: int,
) -> Schedule:
    """The schedule that an engine with these settings follows; without `kv_blocks`, as many as memory holds.

    Raises InputError for settings that don't go together.
    """
    from xscheduler.allocation import uniform_stages

    model, profile = setting.model, setting.profile
    _check_engine(setting, policy, **variables)
    stages = uniform_stages(model, _part(setting.cluster, replicas), tp_degree)
    fits = kv_blocks is None
    if kv_blocks is None:
        most = variables.get("max_num_batched_tokens") or variables["prefills_per_step"] * setting.workload.input.max
        kv_blocks = _room(setting, stages, most) * BLOCK_SIZE // block_size
    lengths = setting.workload
    longest = most_cached(lengths.input.max, lengths.output.max, bool(model.encoder_layers))
    if kv_blocks * block_size < longest:
        short = f"{kv_blocks:,} KV blocks of {block_size:,} tokens"
        short += f", all that memory holds on {setting.cluster.name}," if fits else ""
        way = "lower --block-size, shorten the requests, or take larger devices" if fits else ""
        raise InputError(
            f"{short} can't hold the longest request of {longest:,} tokens: "
            f"{way or f'pass --kv-blocks {-(-longest // block_size)} at least'}."
        )
    schedule = Schedule(
        version=Schedule.VERSION,
        policy=policy,
        model=ModelReference(model, model.fingerprint),
        cluster=setting.cluster,
        workload=setting.workload.without_requests,
        profile=ProfileReference(profile.source, profile.fingerprint),
        stages=stages,
        kv_blocks=kv_blocks,
        block_size=block_size,
        dtype=profile.dtype,
        kv_dtype=setting.kv_dtype,
        bound="requests",
        tp_degree=tp_degree,
        replicas=replicas,
        **variables,  # type: ignore[arg-type]
    )
    return checked(schedule)


def _room(setting: Setting, stages: tuple[Stage, ...], tokens: int) -> int:
    """Blocks of BLOCK_SIZE tokens that memory holds beside iterations of so many tokens; InputError for none."""
    from xsimulator.cost.replica import CostModel

    model, cluster = setting.model, setting.cluster
    replica = CostModel(model, cluster, setting.profile, setting.kv_dtype).replica(stages)
    room = replica.room(tokens)
    if replica.room(1) < 1:
        weights = max(stage.weights for stage in replica.memory(1))
        usable = cluster.device.memory_bytes * cluster.memory_fraction
        raise InputError(
            f"The weights of '{model.name}' in {setting.profile.dtype} take {figure_text(weights / 2**30, 4)} GiB of a "
            f"device on {cluster.name}, of which {figure_text(usable / 2**30, 4)} GiB may be used: take more or larger "
            "devices, fewer replicas, or --dtype fp8."
        )
    if room < 1:
        raise InputError(
            f"The weights of '{model.name}' and iterations of {tokens:,} tokens leave no memory for keys and values on "
            f"{cluster.name}: lower the tokens per iteration, or take a larger cluster."
        )
    return room


def _check_engine(setting: Setting, policy: str, **variables: int) -> None:
    """InputError for settings that no engine follows."""
    if TRAITS[policy].splits_prompts and setting.model.encoder_layers:
        raise InputError(
            f"An encoder reads its whole input at once, so '{setting.model.name}' can't be served in chunks: pass "
            "--policy orca."
        )
    budget, residents = variables.get("max_num_batched_tokens"), variables["max_num_seqs"]
    if budget is not None and budget < residents:
        raise InputError(
            f"A budget of {budget:,} tokens per iteration can't give {residents:,} sequences a token each: raise "
            "--max-num-batched-tokens or lower --max-num-seqs."
        )


def _part(cluster: "ClusterSpec", replicas: int) -> "ClusterSpec":
    """The part of a cluster that one of its replicas has: a node's share, or whole nodes."""
    from xscheduler.allocation import replica_sizes

    sizes = replica_sizes(cluster)
    if cluster.devices % replicas or cluster.devices // replicas not in sizes:
        fit = ", ".join(str(cluster.devices // size) for size in reversed(sizes))
        raise InputError(f"{replicas} replicas can't share the devices of {cluster.name} equally: {fit} can.")
    devices, per_node = cluster.devices // replicas, cluster.devices_per_node
    if replicas == 1:
        return cluster
    name = f"the {devices} devices of a replica on {cluster.name}"
    if devices <= per_node:
        return replace(cluster, name=name, nodes=1, devices_per_node=devices)
    return replace(cluster, name=name, nodes=devices // per_node)


def resident(schedule: Schedule, profile: "Profile") -> tuple[Schedule, tuple[str, ...]]:
    """The schedule with as many resident sequences as its KV blocks hold in the steady state, and sentences where those
    are fewer than it allows, or the blocks more than memory holds.

    An engine admits a request when its blocks are free: beyond that `max_num_seqs` is never reached, and requests wait.
    """
    from xsimulator.estimates import outcome
    from xsimulator.steady.scenario import Scenario

    scenario, blocks = Scenario.of(schedule, profile, None, "exact", True), schedule.kv_blocks

    def needed(most: int | None = None) -> int:
        changed = vars(schedule) if most is None else vars(schedule) | {"max_num_seqs": most}
        return outcome(scenario, schedule.policy, changed).demand.blocks * BLOCK_SIZE // schedule.block_size

    notes = []
    if schedule.max_num_seqs is None:
        if needed() > blocks:
            lack = f"the steady state fills {needed():,} KV blocks and the schedule has {blocks:,}"
            notes.append(f"{lack}: requests will wait for them, which --replay shows")
        return schedule, tuple(notes)
    room = scenario.replica.room(_tokens(schedule)) * BLOCK_SIZE // schedule.block_size
    if blocks > room:
        notes.append(f"{blocks:,} KV blocks are more than the {room:,} that memory holds by this estimate")
    if needed() <= blocks:
        return schedule, tuple(notes)
    most = bisect.bisect_right(range(1, schedule.max_num_seqs), blocks, key=needed)
    notes.append(
        f"{blocks:,} KV blocks hold about {most:,} sequences at a time, and --max-num-seqs allows "
        f"{schedule.max_num_seqs:,}: the others wait in the queue, and the figures are for {most:,}"
    )
    return replace(schedule, max_num_seqs=max(1, most)), tuple(notes)


def _tokens(schedule: Schedule) -> int:
    """The most tokens of an iteration."""
    return schedule.max_num_batched_tokens or (schedule.prefills_per_step or 1) * schedule.workload.input.max
