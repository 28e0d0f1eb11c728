"""Convert the user's input to specs: model, cluster, workload and profile, with the assumptions made."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict

from xcore.choices import check_choice
from xcore.errors import InputError
from xcore.policies import runs
from xcore.quantity import figure_text, percent_text
from xcore.specs.cluster import ClusterSpec, is_cluster_file, parse_cluster
from xcore.specs.deployment import Deployment
from xcore.specs.engine_memory import DATA_SHEET
from xcore.specs.engine_spec import EngineSpec, engine_of
from xcore.specs.model import (
    ARITHMETIC,
    BYTES,
    DTYPES,
    KV_DTYPES,
    KV_SCALE_BYTES,
    WEIGHT_BITS,
    ModelSpec,
    usual_kv_dtype,
    weights_dtype,
)
from xcore.specs.prefix_hit import hit_text, with_prefix_hit
from xcore.specs.profile import Profile
from xcore.specs.schedule import Schedule
from xcore.specs.speculation import Speculation, check_drafting
from xcore.specs.workload import Workload
from xcore.traces.fit_context import fit_context
from xcore.usable_cpus import usable_cpus
from xprofiler.kernel_import import KernelImport, kernel_import
from xprofiler.profiles import find_profile
from xprofiler.roofline_device import arithmetic
from xprofiler.rooflines import accuracy, engine_notes, own_profile, stock_profile


@dataclass(frozen=True)
class Setting:
    """All the input that a search for a schedule needs."""

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    profile: Profile
    kv_dtype: str
    assumptions: tuple[str, ...]
    own: Deployment | None = None
    """This project's engine, for the policies that the profile's engine doesn't run; None: one engine for all."""
    kernels: KernelImport | None = None
    """The kernel import that could replace the data sheet; None: another kind of profile, or no tables cover it."""
    speculation: Speculation | None = None
    """Speculative decoding in decode iterations; None: no draft tokens."""
    divides: bool = False
    """Whether searches try other divisions of the model's experts (expert_divisions.py)."""

    def on(self, policy: str) -> "Setting":
        """Return the same setting with the engine that runs a policy."""
        if self.own is None or runs(engine_of(self.profile).name, policy):
            return replace(self, own=None)
        return replace(self, cluster=self.own.cluster, profile=self.own.profile, own=None)

    def with_prefix_hit(self, share: float) -> "Setting":
        """Return the setting with a share of the prompts' tokens in the prefix cache."""
        return replace(
            self, workload=with_prefix_hit(self.workload, share), assumptions=(*self.assumptions, hit_text(share))
        )


def with_draft(setting: Setting, draft: ModelSpec | None) -> Setting:
    """Return the setting whose profiles have the times of a draft model too; InputError for a model with an encoder."""
    check_drafting(setting.model)
    if draft is None:
        return setting
    own, kept = setting.own, setting.kv_dtype
    if own:
        own = replace(own, profile=draft_profile(own.profile, draft, own.cluster, kept))
    return replace(setting, profile=draft_profile(setting.profile, draft, setting.cluster, kept), own=own)


def draft_profile(profile: Profile, draft: ModelSpec, cluster: ClusterSpec, kv_dtype: str) -> Profile:
    """Return a profile with the times of a draft model on the same devices, by the roofline."""
    times = stock_profile(draft, cluster, draft.dtype or profile.dtype, kv_dtype, engine_of(profile).name)
    return replace(profile, draft=times.degrees)


def for_schedule(profile: Profile, schedule: Schedule) -> Profile:
    """Return a profile for a schedule: with the times of its draft model, if it has one."""
    draft = schedule.speculation.draft if schedule.speculation else None
    return draft_profile(profile, draft, schedule.cluster, schedule.kv_dtype) if draft else profile


def find_model(text: str) -> ModelSpec:
    """Return the spec of a built-in model or of a model directory."""
    from xcore.specs.builtin_models import builtin_model

    return ModelSpec.from_directory(text) if Path(text).is_dir() else builtin_model(text)


class SettingKeywords(TypedDict, total=False):
    """Keywords of `find_setting` that hold for all models of a file."""

    dtype: str | None
    kv_dtype: str | None
    memory_fraction: float | None
    expert_parallel: bool
    attention_dp: int | None
    scale_to_context: bool
    engine: str | None
    front_end: str | None


def find_setting(
    model: str | None = None,
    cluster: str | None = None,
    workload: str | Workload | None = None,
    profile: str | None = None,
    *,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    memory_fraction: float | None = None,
    expert_parallel: bool = False,
    attention_dp: int | None = None,
    columns: str | None = None,
    scale_to_context: bool = False,
    rate: str | None = None,
    device: str | None = None,
    engine: str | None = None,
    one_by_one: bool = False,
    attention: str = "triton",
    front_end: str | None = None,
    one_engine: bool = False,
    name: str = "",
) -> Setting:
    """Return the specs for the user's input.

    Without input, the setting is OPT-13B on four A40 with task S. With a model directory, the cluster is this machine:
    its GPU if it has one and `device` names no other device. The assumptions name these defaults. With `one_by_one`,
    each request is simulated with its own pair of lengths instead of the two distributions. With `one_engine`, all
    policies are predicted with the same engine. `attention` has the same meaning as in `find_profile`. `name` is the
    model's name in a file with several models.
    """
    from xcore.specs.builtin_models import stands_for

    assumptions: list[str] = []
    if model is None:
        model = "opt-13b"
        assumptions.append("model: opt-13b, the default")
    spec = with_experts(find_model(model), expert_parallel, attention_dp)
    if not Path(model).is_dir() and (sizes := stands_for(model)):
        context = f"a context of {spec.context:,} tokens" if spec.longest_request else "an unlimited request length"
        assumptions.append(f"model: '{model}' has the sizes of {sizes}, with {context}")
    if cluster is None:
        cluster = "local" if Path(model).is_dir() else "4xA40"
        assumptions.append(f"cluster: {cluster}, the default")
    if device and cluster != "local":
        raise InputError(
            f"--device {device} selects a device of this machine, but the cluster is '{cluster}': leave one of them "
            "out."
        )
    where = _local(device, memory_fraction) if cluster == "local" else parse_cluster(cluster, memory_fraction)
    _check_attention_dp(spec, where)
    described = cluster == "local" or is_cluster_file(cluster)
    assumptions += _one_node_text(where)
    read, how_read = _workload(workload, columns, rate)
    assumptions += how_read
    load, scaling = fit_context(read, spec, scale_to_context)
    if not one_by_one:
        scaling += _independent_text(load, read.name)
    dtype, kv_dtype = _known_dtype(dtype, "--dtype", tuple(BYTES)), _known_dtype(kv_dtype, "--kv-dtype", KV_DTYPES)
    if dtype and cluster == "local":
        dtype = weights_dtype(spec.dtype, dtype)
        assumptions += _other_weights_text(spec, dtype)
    named_file = profile not in (None, "roofline")
    usual, why = (None, "the profile's") if named_file else _usual_dtype(spec, where)
    how = {"kv_dtype": kv_dtype, "engine": engine, "front_end": front_end}
    chosen, which = find_profile(profile, spec, where, dtype or usual, **how, attention=attention)
    kept = kv_dtype or chosen.kv_dtype
    _check_int8(kept, spec, where)
    assumptions += _kv_text(kv_dtype, kept, chosen)
    if cluster == "local" and kept not in (usual_kv_dtype(chosen.dtype), "int8"):
        assumptions.append(
            f"warning: `exegpt run` refuses keys and values in {kept} with weights in {chosen.dtype}: leave --kv-dtype "
            "out, or pass --kv-dtype int8"
        )
    if dtype is None:
        assumptions.append(f"dtype: {chosen.dtype}, {why}")
    assumptions += _beyond_dense_text(spec, chosen, where, load)
    if memory_fraction is None and not described:
        serving = engine_of(chosen)
        where = replace(where, memory_fraction=serving.memory.fraction)
        assumptions.append(f"memory: {_memory_text(where, serving)}")
    own = None if one_engine else own_profile(chosen, spec, where)
    deployed = where
    if own and memory_fraction is None and not described:
        deployed = replace(where, memory_fraction=engine_of(own).memory.fraction)
    whose = (*engine_notes(own or chosen, chosen), *accuracy(chosen, where, spec))
    kernels = kernel_import(chosen, spec, where, kept, model, name)
    said = (*assumptions, *scaling, which, *whose, *([kernels.text] if kernels else []))
    return Setting(spec, where, load, chosen, kept, said, Deployment(deployed, own) if own else None, kernels)


def _workload(asked: str | Workload | None, columns: str | None, rate: str | None) -> tuple[Workload, list[str]]:
    """Return the workload that the user typed, or the default, with sentences on what was assumed."""
    from xcore.columns import parse_columns
    from xcore.traces.trace import parse_rate, parse_workload

    if isinstance(asked, Workload):
        return asked, []
    texts = ["workload: task S (summarization), the default"] if asked is None else []
    named = parse_columns(columns) if columns else None
    return parse_workload(
        "S" if asked is None else asked, named, parse_rate(rate) if rate else None, texts.append
    ), texts


def _independent_text(load: Workload, name: str) -> list[str]:
    """Return sentences on what a steady state ignores of the requests of a trace."""
    texts = []
    if load.copula:
        known = load.correlation is not None
        correlation = f" (their correlation in the trace is {load.correlation:+.2f})" if known else ""
        classes = len(load.copula.shares)
        texts.append(
            f"inputs and outputs depend on each other{correlation}: steady states count this by "
            f"{classes} classes of lengths"
        )
    elif load.correlation is not None:
        texts.append(f"inputs and outputs are independent; their correlation in the trace is {load.correlation:+.2f}")
    if any(request.identity for request in load.requests or ()):
        texts.append(
            f"prompts: {name} says which prompts share prefixes; a steady state ignores this, but replays and "
            "searches at a rate use it with --prefix-caching"
        )
    return texts


def _one_node_text(cluster: ClusterSpec) -> list[str]:
    """Warn if a single node has so many devices that the user may mean nodes of eight."""
    devices, kind = cluster.devices_per_node, cluster.device.kind
    if cluster.name != f"{devices}x{kind}" or devices not in range(16, 1 << 20, 8):
        return []
    nodes = f"{devices // 8}x8x{kind}"
    return [
        (f"cluster: {cluster.name} is one node with equal links between all devices; write {nodes} for nodes of eight")
    ]


def _check_int8(kv_dtype: str, model: ModelSpec, cluster: ClusterSpec) -> None:
    """Raise InputError for keys and values in int8 that no engine computes."""
    if kv_dtype != "int8":
        return
    if not cluster.is_cpu:
        raise InputError(
            f"--kv-dtype int8 runs on CPUs only, and the cluster is '{cluster.name}': use fp8, or leave it out."
        )
    if model.encoder_layers or model.latent or model.head_size % KV_SCALE_BYTES:
        raise InputError(
            f"--kv-dtype int8 needs a decoder-only model with heads of a multiple of {KV_SCALE_BYTES} values, unlike "
            f"'{model.name}': leave it out."
        )


def other_kv_text(kept: str, profile: Profile) -> str:
    """Return a warning if a profile's times are of another KV dtype than the `kept` one; empty if they are not."""
    timed = profile.kv_dtype if profile.source == "measured" else profile.provenance.get("kv_dtype", kept)
    if timed == kept:
        return ""
    what = f"keys and values are in {kept}, but the profile was measured for {timed}"
    return f"warning: {what}: measure a profile for {kept}"


def _kv_text(asked: str | None, kept: str, profile: Profile) -> list[str]:
    """Return sentences on the KV dtype if the user chose none, or if it differs from the profile's."""
    if other := other_kv_text(kept, profile):
        return [other]
    if asked or kept == profile.dtype:
        return []
    if kept != usual_kv_dtype(profile.dtype):
        return [f"keys and values: {kept}, the profile's"]
    return [f"keys and values: {kept}, the default for weights in {profile.dtype}; --kv-dtype sets another dtype"]


def _beyond_dense_text(model: ModelSpec, profile: Profile, cluster: ClusterSpec, workload: Workload) -> list[str]:
    """Return sentences on what is assumed of weights of few bits, of experts, and of layers with windows."""
    texts, experts, windows = [], model.experts, model.windows
    if BYTES[profile.dtype] < 2 and profile.source == "roofline" and not cluster.is_cpu:
        computed = arithmetic(cluster.device, profile.dtype)
        if computed != ARITHMETIC.get(profile.dtype, profile.dtype):
            texts.append(f"weights: {profile.dtype}, converted to {computed} in each product on {cluster.device.kind}")
    if experts:
        held = f", in {profile.dtype}; the rest is in bf16" if experts.alone and BYTES[profile.dtype] < 2 else ""
        texts.append(
            f"experts: {experts.per_token} of {experts.count} per token in {experts.layers} of {model.layers} layers, "
            f"{split_text(model, profile)}{held}; their loads follow a power law with exponent {experts.skew:g}"
        )
    widest = max(degree.tp for degree in profile.degrees)
    if model.latent and experts and widest > 1:
        texts.append(
            "latent attention: each device of a tensor-parallel group keeps all keys and values; "
            f"--attention-dp {widest} gives each its own sequences instead"
        )
    if windows:
        tokens = workload.mean_tokens
        texts.append(
            f"windows: {windows.layers} of {model.layers} layers see {windows.size:,} tokens; the cache keeps "
            f"{percent_text(model.kept_share(tokens))} of a request's tokens, as for one of {tokens:,.0f} tokens"
        )
    return texts


def with_experts(model: ModelSpec, expert_parallel: bool, attention_dp: int | None) -> ModelSpec:
    """Return the model with its experts divided among devices as asked; InputError for a model without experts."""
    if not expert_parallel and attention_dp is None:
        return model
    if model.experts is None:
        option = "--expert-parallel" if expert_parallel else f"--attention-dp {attention_dp}"
        raise InputError(f"{option}: model '{model.name}' has no experts; leave the option out.")
    shared = 1 if attention_dp is None else attention_dp
    return replace(model, experts=replace(model.experts, expert_parallel=expert_parallel, attention_dp=shared))


def _check_attention_dp(model: ModelSpec, cluster: ClusterSpec) -> None:
    """Raise InputError unless the devices that share experts are a part of a node, or whole nodes."""
    shared, per_node = model.attention_dp, cluster.devices_per_node
    if per_node % shared and (shared % per_node or cluster.devices % shared):
        raise InputError(
            f"--attention-dp {shared}: '{cluster.name}' has {cluster.nodes} x {per_node} devices, and groups of "
            f"{shared} are neither equal parts of a node nor whole nodes; use a number that divides {per_node}."
        )


def split_text(model: ModelSpec, profile: Profile) -> str:
    """Return how the devices of a tensor-parallel group share the experts, as text."""
    whole = [f"TP{degree.tp}" for degree in profile.degrees if model.expert_parallel(degree.tp, profile.dtype)]
    if model.attention_dp > 1:
        return f"whole ones on {model.attention_dp} devices, each with attention for its own sequences"
    rest = [f"TP{degree.tp}" for degree in profile.degrees if degree.tp > 1 and f"TP{degree.tp}" not in whole]
    texts = [f"a part of each on every device at {', '.join(rest)}"] if rest else []
    texts += [f"whole ones (expert parallelism) at {', '.join(whole)}"] if whole else []
    return " and ".join(texts) or "all on one device"


def _memory_text(cluster: ClusterSpec, engine: EngineSpec) -> str:
    """Return the share of a device's memory that an engine uses by default, as text."""
    device, memory = cluster.device, engine.memory
    whole = device.memory_bytes if memory.data_sheet else device.shown_bytes
    share = f"{percent_text(cluster.memory_fraction)} of the {figure_text(whole / 2**30, 4)} GiB of {device.kind}"
    whose = "the default" if memory == DATA_SHEET else f"{engine.name}'s default"
    return f"{share}{', after the weights' if memory.of_rest else ''}, {whose}"


def run_dtype(asked: str | None, given: Schedule | None, model: ModelSpec, device: str) -> str:
    """Return the dtype that a run on this machine computes in.

    This is the requested dtype, else the given schedule's, else the device's usual dtype for the checkpoint.
    """
    if asked not in (None, "auto"):
        return weights_dtype(model.dtype, asked)
    return given.dtype if given else _local_dtype(model, device == "cpu")[0]


def run_kv_dtype(asked: str | None, given: Schedule | None, dtype: str) -> str:
    """Return the dtype of keys and values of a run in `dtype`: the requested one, else that of the given schedule.

    Without both, it is that of activations. The engine refuses what it can't compute.

    Raises:
        InputError: The schedule has another KV dtype than the requested one.
    """
    kept = _known_dtype(asked, "--kv-dtype", KV_DTYPES)
    if given and kept not in (None, given.kv_dtype):
        raise InputError(
            f"The schedule has keys and values in {given.kv_dtype}, and --kv-dtype asks for {kept}: tune with "
            f"--kv-dtype {kept}."
        )
    return given.kv_dtype if given else kept or usual_kv_dtype(dtype)


def _local_dtype(model: ModelSpec, on_cpu: bool) -> tuple[str, str]:
    """Return a checkpoint's default dtype on this machine's CPU or GPU, and the reason."""
    from xprofiler.machine import computes_bf16

    if not on_cpu:
        return "bf16", "the default on this machine's GPU"
    if model.dtype in ("int4", "w8a16"):
        computed = "bf16" if computes_bf16() else "fp32"
        return weights_dtype(model.dtype, computed), f"because this CPU computes the checkpoint's weights in {computed}"
    if model.dtype is None or BYTES[model.dtype] != 2:
        return "fp32", "the default on CPUs for this checkpoint"
    if computes_bf16():
        return "bf16", f"because this CPU computes in it and the checkpoint is in {model.dtype}"
    return "fp32", f"because this CPU does not compute in bf16, and the checkpoint is in {model.dtype}"


def _other_weights_text(spec: ModelSpec, dtype: str) -> list[str]:
    """Return a warning if a run refuses the dtype, because the checkpoint's weights have another number of bits."""
    held, asked = WEIGHT_BITS.get(spec.dtype or ""), WEIGHT_BITS.get(dtype)
    if held == asked:
        return []
    way = f"its checkpoint has weights of {held} bits, which run in --dtype fp32 or bf16"
    if not held:
        way = f"its checkpoint has plain floats; `exegpt model quantize DIR --bits {asked} --out NEW` makes others"
    return [f"warning: `exegpt run` refuses {dtype} for {spec.name}: {way}"]


def _known_dtype(text: str | None, option: str, known: tuple[str, ...]) -> str | None:
    """Return exegpt's name of a dtype, given this or a checkpoint's (`bfloat16`); None for None and `auto`."""
    if text in (None, "auto"):
        return None
    name = DTYPES.get(text, text)
    check_choice(name, known, option)
    return name


def _usual_dtype(model: ModelSpec, cluster: ClusterSpec) -> tuple[str, str]:
    """Return a model's default dtype for serving, and the reason; on GPUs, it is the dtype of the checkpoint."""
    if cluster.name.startswith("local"):
        return _local_dtype(model, cluster.is_cpu)
    if cluster.is_cpu:
        return "fp32", "the default on CPUs"
    if model.dtype is None:
        return "fp16", "the default, because the checkpoint does not name its dtype"
    dtype, why = model.dtype, "the checkpoint's dtype"
    if dtype == "fp32":
        dtype, why = "bf16", "because checkpoints in fp32 are served in 16 bits"
    if dtype in cluster.device.flops_s or not cluster.device.flops_s or BYTES[dtype] < 2:
        return dtype, why
    if "fp16" not in cluster.device.flops_s:
        return next(iter(cluster.device.flops_s)), f"because {cluster.device.kind} does not compute in {dtype}, {why}"
    return "fp16", f"because {cluster.device.kind} does not compute in {dtype}, {why}"


def _local(device: str | None, memory_fraction: float | None) -> ClusterSpec:
    """Return this machine's device as a cluster."""
    from xprofiler import machine

    cluster = machine.local_named(device)
    return cluster if memory_fraction is None else replace(cluster, memory_fraction=memory_fraction)


def threads_of_device(cluster: str) -> int | None:
    """Return the CPU threads of each device of a cluster file that splits this machine's CPU into several devices.

    Each device gets an equal share of the cores, as its engines do. None for any other cluster.
    """
    where = None if cluster == "local" else parse_cluster(cluster)
    if where is None or not where.is_cpu or where.devices_per_node == 1:
        return None
    return max(1, usable_cpus() // where.devices_per_node)
