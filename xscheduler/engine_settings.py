"""Convert a running engine's settings to the schedule that the engine follows.

`engine_defaults` gives the settings that a command line leaves out.
"""

import bisect
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from xcore.batching.admission import Admission, most_cached
from xcore.choices import admission_rule, check_choice, check_prefix_caching
from xcore.console.schedule_text import stages_text
from xcore.errors import InputError
from xcore.policies import TRAITS, control_variables
from xcore.policies.control import Control, kinds
from xcore.policies.from_schedule import checked
from xcore.quantity import counted, figure_text
from xcore.specs.cluster import ClusterSpec
from xcore.specs.engine_spec import engine_of
from xcore.specs.schedule import BLOCK_SIZE, ModelReference, ProfileReference, Schedule, Stage
from xscheduler.settings import Setting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xcore.specs.cluster import ClusterSpec
    from xcore.specs.profile import Profile
    from xcore.specs.workload import Workload
    from xsimulator.cost.cost_model import Step

_GIB = 2**30


@dataclass(frozen=True)
class EngineDefaults:
    """The default settings of an engine on a device."""

    engine: str
    max_num_batched_tokens: int
    max_num_seqs: int
    admission: Admission = "reserve"
    prefix_caching: bool = False


def engine_defaults(engine: str, cluster: ClusterSpec) -> EngineDefaults:
    """Return the defaults of an engine by the name of its preset.

    A preset that is no server has vLLM's sizes, but reserves blocks and caches no prefixes.
    """
    device = cluster.device
    if engine == "tensorrt-llm":  # trtllm-serve 1.2: max_num_tokens, max_batch_size, GUARANTEED_NO_EVICT, block reuse
        return EngineDefaults(engine, 8192, 2048, "reserve", prefix_caching=True)
    # vLLM's server defaults (see launch_command.RELEASES): by the memory that CUDA reports and the device's name
    memory = device.shown_bytes
    if memory >= 160 * _GIB:
        sizes = 16_384, 1024
    elif memory >= 70 * _GIB and "A100" not in device.kind and not cluster.is_cpu:
        sizes = 8192, 1024
    else:
        sizes = 2048, 256
    if engine == "sglang":  # SGLang's (see RELEASES): chunk size by memory; at least 2,048 requests
        chunk = next((size for gib, size in ((160, 16_384), (60, 8192), (35, 4096)) if memory >= gib * _GIB), 2048)
        return EngineDefaults(engine, chunk, 2048, "grow", prefix_caching=True)
    if engine.startswith("vllm"):
        return EngineDefaults(engine, *sizes, "grow", prefix_caching=True)
    return EngineDefaults("vllm", *sizes)


@dataclass(frozen=True)
class EngineSettings:
    """A running engine's settings; None: the setting wasn't passed."""

    policy: str | None = None
    tp_degree: int | None = None
    replicas: int | None = None
    kv_blocks: int | None = None
    block_size: int | None = None
    admission: str | None = None
    prefix_caching: bool | None = None
    tp_gpus: int | None = None
    encode_devices: int | None = None
    encode_tp_degree: int | None = None
    stages: int | None = None
    """Pipeline stages of a replica; None: as many as its devices allow."""
    layers: tuple[int, ...] | None = None
    """Layers of each stage; None: as even a split as possible."""
    variables: "Mapping[str, int]" = field(default_factory=dict)
    """Control variables by name."""

    @staticmethod
    def of(options: "Mapping[str, Any]") -> "EngineSettings":
        """Return the engine settings among a command's options, by their names."""
        names = EngineSettings.__dataclass_fields__.keys() - {"variables"}
        known = {name: options[name] for name in names if name in options}
        variables = {name: options[name] for name in control_variables() if options.get(name) is not None}
        return EngineSettings(**known, variables={**variables, **options.get("variables", {})})

    @property
    def given(self) -> "dict[str, Any]":
        """All settings that were passed, by name."""
        rest = {name: value for name, value in vars(self).items() if name != "variables"}
        return {name: value for name, value in {**rest, **self.variables}.items() if value is not None}


def follow(setting: Setting, settings: EngineSettings, engine: str | None = None) -> tuple[Schedule, tuple[str, ...]]:
    """Return the schedule that a running engine follows with these settings, and the assumptions made.

    If the user named an `engine`, its defaults also apply to admission and prefix caching.
    Raises InputError for a setting that the policy doesn't have.
    """
    policy = settings.policy or "chunked"
    check_choice(policy, tuple(TRAITS), "--policy")
    running = setting.on(policy)
    if running.profile is not setting.profile:  # its engine doesn't run the policy
        setting, engine = running, None
    if settings.prefix_caching:
        check_prefix_caching(policy, setting.model)
    if TRAITS[policy].name_of("residents") is None:
        return _point(setting, settings, policy)
    _check_variables(settings, policy)
    defaults = engine_defaults(engine or engine_of(setting.profile).name, setting.cluster)
    whose = f"the default of {defaults.engine} on {setting.cluster.device.kind}"
    variables, assumed = _variables(policy, settings, defaults, whose)
    admission, caching, rules = _cache_rules(policy, setting, settings, defaults, engine is not None)
    replicas = settings.replicas or setting.model.attention_dp
    tp_degree = settings.tp_degree or _usual_degree(setting, replicas)
    block_size = settings.block_size or BLOCK_SIZE
    cache, stages = (settings.kv_blocks, block_size), settings.layers or settings.stages
    schedule = engine_schedule(setting, policy, tp_degree, *cache, replicas, stages, **variables)
    schedule = replace(schedule, admission=admission, prefix_caching=caching)
    if not settings.tp_degree and setting.cluster.devices > replicas:
        widest = f"{stages_text(schedule)}, the widest degree that the model and a node allow"
        rules.append(
            f"tensor parallelism: {widest}; --tp-degree sets another degree, --replicas sets the number of replicas"
        )
    return schedule, (*assumed, *rules)


def _check_variables(settings: EngineSettings, policy: str) -> dict[str, int]:
    """Return the control variables and the allocation that were passed.

    Raises InputError for one that the policy doesn't have.
    """
    from xscheduler.search_problem import ALLOCATION, variables_of

    given = {name: value for name, value in settings.given.items() if name in {*settings.variables, *ALLOCATION}}
    for name, value in given.items():
        if name not in variables_of(policy):
            option = f"--{name.replace('_', '-')}"
            raise InputError(f"Policy {policy} has no {option}: leave {option} {value} out.")
    return given


def _point(setting: Setting, settings: EngineSettings, policy: str) -> tuple[Schedule, tuple[str, ...]]:
    """Return the best point of a policy's space with these settings, and a sentence that names the variables chosen.

    Raises InputError if a variable that limits the batch wasn't passed, or if no such point fits in memory.
    """
    from xscheduler.setting_search import search_schedule

    fixed = _check_variables(settings, policy)
    control = TRAITS[policy].control
    needed = [name for name, kind in kinds(control).items() if kind in ("prompts", "period", "residents")]
    missing = [f"--{name.replace('_', '-')}" for name in needed if name not in fixed]
    if missing:
        raise InputError(
            f"A schedule of policy {policy} needs {' and '.join(missing)}: pass {missing[0]} 8, for example."
        )
    for name in ("kv_blocks", "block_size", "prefix_caching"):
        if getattr(settings, name):
            option = f"--{name.replace('_', '-')}"
            raise InputError(
                f"{option} is not an option of policy {policy}: leave it out, or choose a policy that engines have."
            )
    rule = admission_rule(settings.admission, policy)
    answer = search_schedule(setting, None, policies=(policy,), fixed=fixed)
    if answer.schedule is None:
        raise InputError(f"No schedule of policy {policy} has these settings: {answer.alternatives[0].reason}.")
    best = answer.schedule
    free = best.control.decisions | best.tensor_parallelism | {"encode_tp_gpus": None, "replicas": best.replicas}
    chosen = [f"{name}={value}" for name, value in free.items() if name not in fixed and value]
    said = f"options that you did not pass were searched: {', '.join(chosen)} is best, on {stages_text(best)}"
    return replace(best, admission=rule), (said,) if chosen else ()


def _variables(
    policy: str, settings: EngineSettings, defaults: EngineDefaults, whose: str
) -> tuple[dict[str, int], list[str]]:
    """Return the policy's variables, and a sentence for each one that is a default."""
    traits, variables, assumed = TRAITS[policy], dict(settings.variables), []

    def assume(name: str | None, default: int, why: str) -> None:
        if name and name not in variables:
            variables[name] = default
            assumed.append(f"{name}: {default:,}, {why}")

    assume(budget := traits.name_of("tokens"), defaults.max_num_batched_tokens, whose)
    assume(traits.name_of("prompts"), 1, "as in the Orca paper")
    most = min(defaults.max_num_seqs, variables[budget] if budget else defaults.max_num_seqs)
    why = whose if most == defaults.max_num_seqs else "one for each token of the budget"
    assume(traits.name_of("residents"), most, why)
    return variables, assumed


def _cache_rules(
    policy: str, setting: Setting, settings: EngineSettings, defaults: EngineDefaults, typed: bool
) -> tuple[Admission, bool, list[str]]:
    """Return admission, prefix caching, and the assumptions made.

    Settings that were passed win. Otherwise the defaults of the engine apply if the user `typed` an engine.
    """
    assumed = []
    admission = admission_rule(settings.admission, policy)
    if settings.admission is None and typed and TRAITS[policy].grows:
        admission = defaults.admission
        assumed.append(f"admission: {admission}, the default of {defaults.engine}")
    caching = bool(settings.prefix_caching)
    able = TRAITS[policy].caches_prefixes and not setting.model.encoder_layers
    if settings.prefix_caching is None and typed and able:
        caching = defaults.prefix_caching
        assumed.append(f"prefix caching: {'on' if caching else 'off'}, the default of {defaults.engine}")
    return admission, caching, assumed


def _usual_degree(setting: Setting, replicas: int) -> int:
    """Return the usual tensor-parallel degree of engines.

    This is the widest degree within a node that the model and the profile support.
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
    stages: int | tuple[int, ...] | None = None,
    **variables: int,
) -> Schedule:
    """Return the schedule that an engine with these settings follows.

    Without `kv_blocks`, the pool has as many blocks as memory holds. `stages` is the number of stages, or the layers of
    each stage. Raises InputError for settings that contradict each other.
    """
    from xscheduler.allocation import uniform_stages

    model, profile = setting.model, setting.profile
    _check_engine(setting, policy, variables)
    control = TRAITS[policy].record(variables)
    layers = stages if isinstance(stages, tuple) else None
    if tp_degree > 1 and model.attention_dp > 1:
        raise InputError(
            "Replicas that share experts (--attention-dp, or several of vLLM with --enable-expert-parallel) have one "
            f"device each, but the tensor-parallel degree is {tp_degree}: use 1, or leave the sharing out."
        )
    if tp_degree not in model.tp_degrees(tp_degree):
        fit = model.tp_degrees(setting.cluster.devices_per_node)
        raise InputError(
            f"A tensor-parallel degree of {tp_degree} is not possible for model '{model.name}' on nodes of "
            f"{counted(setting.cluster.devices_per_node, 'device')}: use one of {', '.join(map(str, fit))}."
        )
    part = _part(setting.cluster, replicas, tp_degree, len(stages) if isinstance(stages, tuple) else stages)
    line = uniform_stages(model, part, tp_degree, layers)
    fits = kv_blocks is None
    if kv_blocks is None:
        kv_blocks = _room(setting, line, _step(control, setting.workload)) * BLOCK_SIZE // block_size
    lengths = setting.workload
    longest = most_cached(lengths.input.max, lengths.output.max, bool(model.encoder_layers))
    if kv_blocks * block_size < longest:
        short = f"{kv_blocks:,} KV blocks of {block_size:,} tokens"
        short += f", which is all that the memory of {setting.cluster.name} holds," if fits else ""
        way = "lower --block-size, shorten the requests, or use devices with more memory" if fits else ""
        raise InputError(
            f"{short} can't hold the longest request of {longest:,} tokens: "
            f"{way or f'pass --kv-blocks {-(-longest // block_size)} or more'}."
        )
    schedule = Schedule(
        version=Schedule.VERSION,
        policy=policy,
        control=control,
        model=ModelReference(model, model.fingerprint),
        cluster=setting.cluster,
        workload=setting.workload.without_requests,
        profile=ProfileReference(profile.source, profile.fingerprint),
        stages=line,
        kv_blocks=kv_blocks,
        block_size=block_size,
        dtype=profile.dtype,
        kv_dtype=setting.kv_dtype,
        bound="requests",
        replicas=replicas,
        speculation=setting.speculation,
    )
    return checked(schedule)


def _step(control: Control, workload: "Workload") -> "Step":
    """Return the most tokens and sequences that an iteration with these settings computes."""
    residents = control.of_kind("residents") or 1
    prompts = (control.of_kind("prompts") or 1) * workload.input.max
    return float(control.of_kind("tokens") or prompts + residents), float(residents)


def _room(setting: Setting, stages: tuple[Stage, ...], step: "Step") -> int:
    """Return how many blocks of BLOCK_SIZE tokens fit in memory together with such iterations; InputError for none."""
    from xsimulator.cost.cost_model import CostModel

    model, cluster = setting.model, setting.cluster
    asked = False, None, setting.workload.mean_tokens, setting.speculation
    replica = CostModel(model, cluster, setting.profile, setting.kv_dtype, *asked).replica(stages)
    room = replica.room(step)
    fullest = min(replica.memory(step), key=lambda memory: memory.free)
    gib = {name: figure_text(getattr(fullest, name) / 2**30, 4) for name in ("weights", "usable", "held", "workspace")}
    if replica.room((1.0, 1.0)) < 1:
        raise InputError(
            f"On each device of {cluster.name}, the weights of '{model.name}' in {setting.profile.dtype} take "
            f"{gib['weights']} GiB and the engine takes {gib['held']} GiB, but only {gib['usable']} GiB are usable: "
            "use more devices or devices with more "
            f"memory{'' if setting.profile.dtype == 'fp8' else ', fewer replicas, or --dtype fp8'}."
        )
    if room < 1:
        raise InputError(
            f"'{model.name}' can't start on {cluster.name}, because no memory is left for KV blocks: of the "
            f"{gib['usable']} usable GiB of a device, the weights take {gib['weights']} GiB, the engine "
            f"{gib['held']} GiB, and iterations of {step[0]:,.0f} tokens and {step[1]:,.0f} sequences "
            f"{gib['workspace']} GiB; lower --max-num-batched-tokens or --max-num-seqs, or use devices with more "
            "memory."
        )
    return room


def _check_engine(setting: Setting, policy: str, variables: "Mapping[str, int]") -> None:
    """Raise InputError for settings that no engine supports."""
    if TRAITS[policy].splits_prompts and setting.model.encoder_layers:
        raise InputError(
            f"The encoder of '{setting.model.name}' reads a whole prompt at once, so prompts can't be split into "
            "chunks: pass --policy orca."
        )
    TRAITS[policy].control.check(variables)


def _part(cluster: "ClusterSpec", replicas: int, tp_degree: int = 1, stages: int | None = None) -> "ClusterSpec":
    """Return the part of a cluster that one of its replicas has.

    Within a node, groups of `tp_degree` fill the part; otherwise it consists of whole nodes. Remaining devices stay
    idle, as do all devices beyond `stages` stages.
    """
    from xscheduler.allocation import most_replicas, replica_sizes

    sizes = [n for n in replica_sizes(cluster) if most_replicas(cluster, n) >= replicas]
    if not sizes:
        most = f"it has {counted(cluster.devices, 'device')}"
        raise InputError(
            f"{replicas:,} replicas do not fit on {cluster.name}: {most}, and each replica needs at least one; use "
            "fewer replicas."
        )
    devices, per_node = sizes[-1], cluster.devices_per_node
    if stages is not None:
        asked = stages * tp_degree
        if asked not in sizes:
            each = f"{counted(stages, 'stage')} of {counted(tp_degree, 'device')}"
            raise InputError(f"{counted(replicas, 'replica')} of {each} do not fit on {cluster.name}: use fewer.")
        devices = asked
    if tp_degree <= devices <= per_node:
        devices -= devices % tp_degree
    if devices == cluster.devices:
        return cluster
    name = f"the {counted(devices, 'device')} of a replica on {cluster.name}"
    if devices <= per_node:
        return replace(cluster, name=name, nodes=1, devices_per_node=devices)
    return replace(cluster, name=name, nodes=devices // per_node)


def resident(schedule: Schedule, profile: "Profile") -> tuple[Schedule, tuple[str, ...]]:
    """Return the schedule with as many resident sequences as its KV blocks hold in the steady state, and notes.

    A note is added if the schedule allows more residents than that, or has more blocks than memory holds. An engine
    admits a request when its blocks are free. With too few blocks `max_num_seqs` is never reached, and requests wait.
    """
    from xsimulator.estimates import controls_of, outcome
    from xsimulator.steady.scenario import Scenario

    scenario, blocks = Scenario.of(schedule, profile, None, "exact", True), schedule.kv_blocks
    allowed, controls = schedule.control.of_kind("residents"), controls_of(schedule)
    name = schedule.traits.name_of("residents")

    def needed(most: int | None = None) -> int:
        changed = {**controls, **({} if most is None or name is None else {name: most})}
        return outcome(scenario, schedule.policy, changed).demand.blocks * BLOCK_SIZE // schedule.block_size

    notes = []
    if allowed is None:
        if needed() > blocks:
            lack = f"the steady state needs {needed():,} KV blocks, but the schedule has {blocks:,}"
            notes.append(f"{lack}, so requests will wait for free blocks; --replay shows how long")
        return schedule, tuple(notes)
    step = _step(schedule.control, schedule.workload)
    room = scenario.replica.room(step) * BLOCK_SIZE // schedule.block_size
    if blocks > room:
        notes.append(
            f"the schedule has {blocks:,} KV blocks, more than the {room:,} that fit in memory by this estimate"
        )
    if needed() <= blocks:
        return schedule, tuple(notes)
    most = bisect.bisect_right(range(1, allowed), blocks, key=needed)
    notes.append(
        f"{blocks:,} KV blocks hold about {most:,} sequences at a time, although --max-num-seqs allows {allowed:,}; "
        f"the other requests wait in the queue, and the figures are for {most:,}"
    )
    return replace(schedule, control=schedule.control.with_batch(max(1, most))), tuple(notes)
