"""A running engine's settings as the schedule that it follows."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from exegpt.errors import InputError
from exegpt.schedule import BLOCK_SIZE, ModelReference, ProfileReference, Schedule, Stage

if TYPE_CHECKING:
    from exegpt.cli.inputs import Setting
    from exegpt.cluster import ClusterSpec
    from exegpt.profile import Profile


def follow(setting: "Setting", settings: dict[str, Any]) -> Schedule:
    """The schedule that a running engine follows with these settings (option → value, None: not given).

    InputError for a setting that its policy doesn't have.
    """
    from exegpt.cli import inputs

    policy = settings["--policy"] or "chunked"
    inputs.check_choice(policy, ("orca", "chunked"), "--policy")
    foreign = {"orca": "--max-num-batched-tokens", "chunked": "--prefills-per-step"}[policy]
    if settings[foreign] is not None:
        raise InputError(f"Policy {policy} has no {foreign}: leave {foreign} {settings[foreign]} out.")
    own = (
        {"max_num_batched_tokens": settings["--max-num-batched-tokens"] or 2048}
        if policy == "chunked"
        else {"prefills_per_step": settings["--prefills-per-step"] or 1}
    )
    return engine_schedule(
        setting,
        policy,
        settings["--tp-degree"] or 1,
        settings["--kv-blocks"],
        settings["--block-size"] or BLOCK_SIZE,
        settings["--replicas"] or 1,
        max_num_seqs=settings["--max-num-seqs"],
        **own,
    )


def engine_schedule(
    setting: "Setting",
    policy: str,
    tp_degree: int,
    kv_blocks: int | None,
    block_size: int,
    replicas: int = 1,
    **own: int,
) -> Schedule:
    """The schedule that an engine with these settings follows; without `kv_blocks`, as many as memory holds.

    Raises InputError for settings that don't go together.
    """
    from xsimulator.allocation import uniform_stages

    model, profile = setting.model, setting.profile
    _check_engine(setting, policy, **own)
    stages = uniform_stages(model, _part(setting.cluster, replicas), tp_degree)
    if kv_blocks is None:
        most = own.get("max_num_batched_tokens") or own["prefills_per_step"] * setting.workload.input.max
        kv_blocks = _room(setting, stages, most) * BLOCK_SIZE // block_size
    longest = setting.workload.input.max + setting.workload.output.max - 1
    if kv_blocks * block_size < longest:
        raise InputError(
            f"{kv_blocks:,} KV blocks of {block_size} tokens can't hold the longest request of {longest:,} tokens: "
            f"pass --kv-blocks {-(-longest // block_size)} at least."
        )
    return Schedule(
        version=Schedule.VERSION,
        policy=policy,  # type: ignore[arg-type]
        model=ModelReference(model, model.fingerprint),
        cluster=setting.cluster,
        workload=setting.workload.laws,
        profile=ProfileReference(profile.source, profile.fingerprint),
        stages=stages,
        kv_blocks=kv_blocks,
        block_size=block_size,
        dtype=profile.dtype,
        kv_dtype=setting.kv_dtype,
        tp_degree=tp_degree,
        replicas=replicas,
        **own,  # type: ignore[arg-type]
    )


def _room(setting: "Setting", stages: tuple[Stage, ...], tokens: int) -> int:
    """Blocks of BLOCK_SIZE tokens that memory holds beside iterations of so many tokens; InputError for none."""
    from xsimulator.scenario import Scenario

    model, cluster = setting.model, setting.cluster
    room = Scenario(model, cluster, setting.workload, setting.profile, stages, setting.kv_dtype).room(tokens)
    if room < 1:
        raise InputError(
            f"The weights of '{model.name}' and iterations of {tokens:,} tokens leave no memory for keys and values on "
            f"{cluster.name}: lower the tokens per iteration, or take a larger cluster."
        )
    return room


def _check_engine(setting: "Setting", policy: str, **own: int) -> None:
    """InputError for settings that no engine follows."""
    if policy == "chunked" and setting.model.encoder_layers:
        raise InputError(
            f"An encoder reads its whole input at once, so '{setting.model.name}' can't be served in chunks: pass "
            "--policy orca."
        )
    budget, residents = own.get("max_num_batched_tokens"), own["max_num_seqs"]
    if budget is not None and budget < residents:
        raise InputError(
            f"A budget of {budget:,} tokens per iteration can't give {residents:,} sequences a token each: raise "
            "--max-num-batched-tokens or lower --max-num-seqs."
        )


def _part(cluster: "ClusterSpec", replicas: int) -> "ClusterSpec":
    """The part of a cluster that one of its replicas has: a node's share, or whole nodes."""
    from xsimulator.allocation import replica_sizes

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


def block_notes(schedule: Schedule, profile: "Profile") -> tuple[str, ...]:
    """Sentences where a schedule has more KV blocks than fit, or fewer than its steady state takes."""
    from xsimulator.estimates import outcome
    from xsimulator.scenario import Scenario

    scenario, given = Scenario.of(schedule, profile, None, "exact", True), schedule.kv_blocks
    notes = []
    if schedule.policy in ("orca", "chunked"):
        room = scenario.room(_tokens(schedule)) * BLOCK_SIZE // schedule.block_size
        if given > room:
            notes.append(f"{given:,} KV blocks are more than the {room:,} that memory holds by this estimate")
    needed = outcome(scenario, schedule.policy, vars(schedule)).demand.blocks * BLOCK_SIZE // schedule.block_size
    if needed > given:
        notes.append(
            f"the steady state fills {needed:,} KV blocks and the schedule has {given:,}: requests will wait for them, "
            "which --replay shows"
        )
    return tuple(notes)


def _tokens(schedule: Schedule) -> int:
    """The most tokens of an iteration."""
    return schedule.max_num_batched_tokens or (schedule.prefills_per_step or 1) * schedule.workload.input.max
