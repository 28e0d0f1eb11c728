"""What people type, made into nouns: model, cluster, workload and profile, with what was assumed on the way."""

from dataclasses import dataclass, replace
from pathlib import Path

from exegpt.batching.admission import Admission
from exegpt.cluster import ClusterSpec, device_kind, parse_cluster
from exegpt.errors import InputError
from exegpt.model import BYTES, DTYPES, ModelSpec
from exegpt.policies import checked
from exegpt.profile import Profile
from exegpt.quantity import figure_text, percent_text
from exegpt.schedule import Schedule
from exegpt.trace import SUFFIXES
from exegpt.workload import Workload

_ROOFLINE_HERE = (
    "this machine's two rates, which kernels miss and to which an engine adds: good for comparing, no promise (a small "
    "model's run can take ten times as long); `exegpt profile` measures"
)


@dataclass(frozen=True)
class Setting:
    """Everything that a schedule is searched for."""

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    profile: Profile
    kv_dtype: str
    assumptions: tuple[str, ...]


def find_model(text: str) -> ModelSpec:
    """The spec of a built-in model or of a model directory."""
    from exegpt.builtin_models import builtin_model

    return ModelSpec.from_directory(text) if Path(text).is_dir() else builtin_model(text)


def model_directory(text: str) -> Path:
    """The directory of a model whose weights are needed."""
    if not Path(text).is_dir():
        raise InputError(f"There is no model directory '{text}': `exegpt model create {text}` makes one.")
    return Path(text)


def read_schedule(path: Path) -> Schedule:
    """A schedule from its file; another version is refused before anything else is looked at."""
    from exegpt import document

    data = document.read_json(path)
    version = data.get("version") if isinstance(data, dict) else None
    if isinstance(data, dict) and {"schedule", "frontier"} & data.keys():
        raise InputError(f"'{path}' is what --json prints, and no schedule file: `exegpt tune --out FILE` writes one.")
    if version != Schedule.VERSION:
        raise InputError(
            f"'{path}' is not a schedule of version {Schedule.VERSION} (its version is {version!r}): tune again."
        )
    schedule = document.from_dict(Schedule, data, f"'{path}'")
    try:
        checked(schedule).check_stages()
    except InputError as error:
        raise InputError(f"'{path}': {error}") from None
    needed = sum(stage.tp for stage in schedule.stages) * schedule.replicas
    if needed > schedule.cluster.devices:
        has = f"its cluster '{schedule.cluster.name}' has {schedule.cluster.devices:,}"
        raise InputError(f"'{path}': The schedule needs {needed:,} devices, and {has}: tune again.")
    return schedule


def check_choice(value: str, allowed: tuple[str, ...], option: str) -> None:
    """InputError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise InputError(f"{option} '{value}' is not known: use one of {', '.join(allowed)}.")


def check_columns(columns: str | None, *sources: str | None) -> None:
    """InputError for a trace's columns where none of `sources` is a trace."""
    if columns and not any(Path(source or "").suffix in SUFFIXES for source in sources):
        raise InputError(f"--columns '{columns}' names the columns of a trace, and there is none: leave --columns out.")


def policy_names(text: str | None) -> tuple[str, ...]:
    """The policies in a comma-separated list; all that can be searched where there is none."""
    from xscheduler.tune import POLICIES

    if text is None:
        return POLICIES
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",")))
    for name in names:
        check_choice(name, POLICIES, "Policy")
    return names


def fit_context(workload: Workload, model: ModelSpec) -> tuple[Workload, list[str]]:
    """The workload scaled to the model's context where its 99th percentile doesn't fit, and a sentence that says so, as
    its name does.

    T5's positions are relative, so it has no longest sequence. InputError for fixed lengths that don't fit: they are
    what was asked for, not a sample of it.
    """
    if model.architecture == "t5":
        return workload, []
    lengths = (workload.input.max, workload.output.max)
    if workload.requests is None and lengths == (workload.input.lengths[0], workload.output.lengths[0]):
        if sum(lengths) > model.context:
            raise InputError(
                f"Requests of {lengths[0]:,} + {lengths[1]:,} = {sum(lengths):,} tokens don't fit the context of "
                f"'{model.name}', {model.context:,} tokens: shorten them, or take a model with a longer one."
            )
        return workload, []
    scaled, factor, clipped = workload.scaled_to(model.context)
    if factor == 1.0 and not clipped:
        return workload, []
    context = f"the context of {model.context:,} tokens"
    if factor == 1.0:
        named = replace(scaled, name=f"{workload.name} clipped to {model.context:,} tokens")
        return named, [f"{percent_text(clipped)} of the requests are longer than {context} and are clipped"]
    named = replace(scaled, name=f"{workload.name} × {figure_text(factor)}")
    text = f"lengths of workload {workload.name} times {figure_text(factor)}, to fit {context}"
    rest = f"; {percent_text(clipped)} of the requests are longer still and are clipped" if clipped else ""
    return named, [text + rest]


def find_profile(
    text: str | None,
    model: ModelSpec,
    cluster: ClusterSpec,
    dtype: str | None,
    *,
    kv_dtype: str | None = None,
    engine: str | None = None,
    attention: str = "triton",
) -> tuple[Profile, str]:
    """The profile that `--profile` asks for (None: the stored one, else the roofline), and which one it is. Without a
    dtype it is a file's, in its own. An `engine` is named for a roofline, and refused beside what was measured. A
    stored one was measured with the same `attention`; the text names a file's where it is another.
    """
    from exegpt.cli import stock

    stock.check_engine(engine, text)
    if text is not None and text != "roofline":
        read = _profile_from_file(text, model, dtype)
        return read, f"profile: '{text}'{_elsewhere(read, cluster)}{_otherwise(read, attention)}"
    assert dtype, "only files know their own"
    from exegpt.cli.own_profile import profile_text
    from xprofiler import machine, store

    here = machine.which(cluster) if cluster.name.startswith("local") else None
    if here and text is None:
        stored = store.find_here(model, dtype, here, attention)
        if stored:
            stock.check_engine(engine, stored.fingerprint)
            return stored, profile_text(stored) + _unrest(stored)
    found = stock.stock_profile(model, cluster, dtype, kv_dtype, engine)
    why = "" if text else ", none that was measured fits this model, cluster and dtype"
    told = _ROOFLINE_HERE if here and engine is None else stock.told(found, engine is not None)
    return found, f"profile: roofline{why}; {told}"


def _elsewhere(profile: Profile, cluster: ClusterSpec) -> str:
    """That a profile was measured on other devices than the cluster's; nothing where it was on those, by any name."""
    try:
        kind = device_kind(profile.device).kind
    except InputError:
        kind = profile.device
    if cluster.name.startswith("local") or kind == cluster.device.kind:
        return ""
    return f", whose times are of {kind} and not of {cluster.device.kind}"


def _otherwise(profile: Profile, attention: str) -> str:
    """A profile's attention where it isn't the run's; empty where the profile names none."""
    measured = profile.provenance.get("attention")
    if measured is None or measured.split()[0] == attention:
        return ""
    return f", measured with attention by {measured} and not by {attention}"


def _unrest(profile: Profile) -> str:
    """A warning for a profile whose times varied much while they were measured; else nothing."""
    layer = profile.degrees[0].decoder
    tables = (layer.rest, layer.encode_attention, layer.decode_attention, profile.degrees[0].head)
    spread = max((sum(t.spread) / len(t.spread) for t in tables if t.spread), default=0.0)
    if spread < 0.5:
        return ""
    return f"; its times vary by {spread:.0%}, since the machine was busy: run `exegpt profile` again when it is quiet"


def _profile_from_file(path: str, model: ModelSpec, dtype: str | None) -> Profile:
    from exegpt import document

    profile = document.read(Profile, path)
    if profile.model != model.fingerprint:
        raise InputError(f"The profile '{path}' is for another model than '{model.name}': profile this one.")
    if dtype not in (None, profile.dtype):
        raise InputError(f"The profile '{path}' is in {profile.dtype}, not in {dtype}: pass --dtype {profile.dtype}.")
    return profile


def find_setting(
    model: str | None = None,
    cluster: str | None = None,
    workload: str | Workload | None = None,
    profile: str | None = None,
    *,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    memory_fraction: float | None = None,
    columns: str | None = None,
    rate: str | None = None,
    device: str | None = None,
    engine: str | None = None,
    one_by_one: bool = False,
    attention: str = "triton",
) -> Setting:
    """The nouns for what was typed. What wasn't becomes OPT-13B on four A40 and task S, or, for a model directory,
    this machine, its GPU where it has one and `device` asks for no other; the assumptions say so. `one_by_one`: each
    request is simulated with its own pair of lengths, not with the two distributions. `attention` as in `find_profile`.
    """
    from exegpt.builtin_models import stands_for
    from exegpt.cli.stock import accuracy
    from exegpt.columns import parse_columns
    from exegpt.trace import parse_rate, parse_workload

    assumptions: list[str] = []
    if model is None:
        model = "opt-13b"
        assumptions.append("model: opt-13b, the default")
    spec = find_model(model)
    if not Path(model).is_dir() and (sizes := stands_for(model)):
        assumptions.append(f"model: '{model}' has the sizes of {sizes}, with a context of {spec.context:,} tokens")
    if cluster is None:
        cluster = "local" if Path(model).is_dir() else "4xA40"
        assumptions.append(f"cluster: {cluster}, the default")
    if device and cluster != "local":
        raise InputError(f"--device {device} is this machine's, and the cluster is '{cluster}': leave one of them out.")
    where = _local(device, memory_fraction) if cluster == "local" else parse_cluster(cluster, memory_fraction)
    if where.name == f"{where.devices_per_node}x{where.device.kind}" and where.devices_per_node in range(
        16, 1 << 20, 8
    ):
        nodes = f"{where.devices_per_node // 8}x8x{where.device.kind}"
        assumptions.append(
            f"cluster: {where.name} is one node, all its devices linked alike; nodes of eight are {nodes}"
        )
    if workload is None:
        workload = "S"
        assumptions.append("workload: task S (summarization), the default")
    if isinstance(workload, str):
        named = parse_columns(columns) if columns else None
        workload = parse_workload(workload, named, parse_rate(rate) if rate else None, assumptions.append)
    load, scaling = fit_context(workload, spec)
    if load.correlation is not None and not one_by_one:
        scaling.append(f"inputs and outputs independent; their correlation in the trace is {load.correlation:+.2f}")
    dtype, kv_dtype = _known_dtype(dtype, "--dtype"), _known_dtype(kv_dtype, "--kv-dtype")
    named_file = profile not in (None, "roofline")
    usual, why = (None, "the profile's") if named_file else _usual_dtype(spec, where)
    how = {"kv_dtype": kv_dtype, "engine": engine}
    found, which = find_profile(profile, spec, where, dtype or usual, **how, attention=attention)
    if dtype is None:
        assumptions.append(f"dtype: {found.dtype}, {why}")
    return Setting(spec, where, load, found, kv_dtype or found.dtype, (*assumptions, *scaling, which, *accuracy(found)))


def run_dtype(asked: str | None, given: Schedule | None, device: str) -> str:
    """What a run on this machine computes in: as asked, else a given schedule's, else the device's own."""
    return asked or (given.dtype if given else None) or ("fp32" if device == "cpu" else "bf16")


def _known_dtype(text: str | None, option: str) -> str | None:
    """A dtype by our name or a checkpoint's (`bfloat16`); None and `auto`: not asked for."""
    if text in (None, "auto"):
        return None
    name = DTYPES.get(text, text)
    check_choice(name, tuple(BYTES), option)
    return name


def _usual_dtype(model: ModelSpec, cluster: ClusterSpec) -> tuple[str, str]:
    """The dtype that a model is served in where none was asked for, and why: on GPUs the checkpoint's own."""
    if cluster.is_cpu:
        return "fp32", "the default on CPUs"
    if cluster.name.startswith("local"):
        return "bf16", "the default on this machine's GPU"
    if model.dtype is None:
        return "fp16", "the default where the checkpoint doesn't say its own"
    own, why = model.dtype, "the checkpoint's own"
    if own == "fp32":
        own, why = "bf16", "since checkpoints in fp32 are served in 16 bits"
    if own in cluster.device.flops_s or not cluster.device.flops_s:
        return own, why
    if "fp16" not in cluster.device.flops_s:
        return next(iter(cluster.device.flops_s)), f"since {cluster.device.kind} doesn't compute in {own}, {why}"
    return "fp16", f"since {cluster.device.kind} doesn't compute in {own}, {why}"


def _local(device: str | None, memory_fraction: float | None) -> ClusterSpec:
    """This machine's device as a cluster."""
    from exegpt.models.device import find_device
    from xprofiler import machine

    cluster = machine.local(find_device(device))
    return cluster if memory_fraction is None else replace(cluster, memory_fraction=memory_fraction)


def set_threads(threads: int | None) -> None:
    """Use so many CPU threads; None leaves torch's own choice, one per core."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def admission_rule(typed: str | None, policy: str | None) -> Admission:
    """The rule that --admission names; InputError for one that the policy doesn't have."""
    from exegpt.policies import TRAITS

    if typed is None:
        return "reserve"
    check_choice(typed, ("reserve", "grow"), "--admission")
    if typed == "reserve":
        return "reserve"
    growing = [name for name, traits in TRAITS.items() if traits.grows]
    if policy is not None and policy not in growing:
        raise InputError(f"--admission grow is for {', '.join(growing)}, and the policy is {policy}: leave it out.")
    return "grow"


def check_prefix_caching(policy: str | None, model: ModelSpec) -> None:
    """InputError for --prefix-caching where the policy, or all of them, can't for a model."""
    from exegpt.policies import TRAITS

    caching = [name for name, traits in TRAITS.items() if traits.caches_prefixes]
    if model.encoder_layers:
        raise InputError(
            f"--prefix-caching is for decoder-only models, and '{model.name}' has an encoder: leave it out."
        )
    if policy is not None and policy not in caching:
        raise InputError(f"--prefix-caching is for {', '.join(caching)}, and the policy is {policy}: leave it out.")
