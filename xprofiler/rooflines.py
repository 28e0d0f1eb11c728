"""Unmeasured profiles: the roofline of a named cluster under a named engine, and the known errors of such rooflines."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from xcore.duration import duration_text
from xcore.errors import InputError
from xcore.policies import TRAITS, runs
from xcore.specs.cluster import ClusterSpec, is_stock
from xcore.specs.device_sheets import SHEETS
from xcore.specs.engine_spec import OWN_ENGINE

if TYPE_CHECKING:
    from xcore.specs.model import ModelSpec
    from xcore.specs.profile import Profile
    from xcore.specs.schedule import Schedule
    from xprofiler.roofline_errors import RooflineErrors

DEFAULT_ENGINE = "vllm"
"""The most common engine. On this machine, the project's runner serves; a measured profile has its time."""


def default_engine(cluster: ClusterSpec) -> str:
    """Return the default engine of a cluster."""
    return "none" if cluster.is_cpu or cluster.name.startswith("local") else DEFAULT_ENGINE


def stock_profile(
    model: "ModelSpec",
    cluster: ClusterSpec,
    dtype: str,
    kv_dtype: str | None = None,
    engine: str | None = None,
    front_end_s: float | None = None,
) -> "Profile":
    """Return the roofline of a cluster under an engine, with another front-end time if one is given.

    This machine's rates are measured once (a second).
    """
    from xcore.specs.engine_spec import find_engine
    from xprofiler import store
    from xprofiler.roofline import roofline_profile

    serving = find_engine(engine or default_engine(cluster))
    if front_end_s is not None:
        serving = replace(serving, front_end_s=front_end_s)
    known = cluster if cluster.device.flops_s else store.measured_once(cluster, dtype)
    return roofline_profile(model, known, dtype, kv_dtype=kv_dtype, engine=serving)


def like(profile: "Profile", model: "ModelSpec", cluster: ClusterSpec) -> "Profile":
    """Return the roofline of another cluster in a roofline's dtypes and under its engine."""
    facts = profile.provenance
    return stock_profile(model, cluster, profile.dtype, facts["kv_dtype"], facts["engine"], profile.front_end_s)


def own_profile(profile: "Profile", model: "ModelSpec", cluster: ClusterSpec) -> "Profile | None":
    """Return the profile with this project's engine instead of another server; None if it has no other server."""
    from xcore.specs.engine_spec import ENGINES, find_engine
    from xprofiler.operators import with_engine

    name = profile.provenance.get("serving" if profile.source == "operators" else "engine", "none")
    if cluster.is_cpu or name not in ENGINES or all(runs(name, policy) for policy in TRAITS):
        return None
    own = find_engine(OWN_ENGINE)
    if profile.front_end_s != find_engine(name).front_end_s:  # the user gave another one
        own = replace(own, front_end_s=profile.front_end_s)
    if profile.source == "operators":
        return with_engine(profile, model, cluster, own)
    facts = profile.provenance
    return stock_profile(model, cluster, profile.dtype, facts["kv_dtype"], OWN_ENGINE, own.front_end_s)


def engine_notes(own: "Profile", chosen: "Profile") -> tuple[str, ...]:
    """Return sentences on the unmeasured parts of this project's engine, if any policy is predicted with it."""
    from xcore.specs.engine_spec import engine_of

    if engine_of(own).name != OWN_ENGINE or own.device == "cpu":
        return ()
    summed = "the GPU memory that it uses is the sum of its allocations"
    texts = [f"engine exegpt: {summed}, not a measurement"]
    if own.source != "measured":
        texts = [
            f"engine exegpt: nothing was measured on a GPU; {summed}, its own time is that of a CPU, and kernels, "
            "links and sampling are assumed to equal those of vLLM"
        ]
    if own is not chosen:
        theirs = engine_of(chosen).name
        names = ", ".join(policy for policy in TRAITS if not runs(theirs, policy))
        texts.insert(0, f"engines: {theirs} does not run {names}; the predictions for them use engine exegpt")
    return tuple(texts)


def found_on(schedule: "Schedule") -> "Profile | None":
    """Return the roofline with which a schedule was found; None if it is not the roofline of a known engine."""
    return next((p for p in _candidates(schedule) if p.fingerprint == schedule.profile.fingerprint), None)


def _candidates(schedule: "Schedule") -> "Iterator[Profile]":
    from xcore.specs.engine_spec import ENGINES

    if schedule.profile.source != "roofline":
        return
    for name in dict.fromkeys((default_engine(schedule.cluster), *ENGINES)):
        yield stock_profile(schedule.model.spec, schedule.cluster, schedule.dtype, schedule.kv_dtype, name)


def check_engine(engine: str | None, profile: "Profile | None" = None, which: str = "") -> None:
    """Check that an engine is known and fits a profile, which messages call `which`.

    Raises:
        InputError: The engine is unknown, or the profile has another engine's time.
    """
    from xcore.specs.engine_spec import engine_of, find_engine

    if engine is None:
        return
    find_engine(engine)
    if profile is not None and profile.source != "operators" and engine_of(profile).name != engine:
        raise InputError(
            f"--engine {engine} requires a roofline or imported kernels, but the profile '{which}' was measured "
            f"with engine {engine_of(profile).name}: leave one of them out."
        )


def engine_text(profile: "Profile", typed: bool = True) -> str:
    """Return a text that names the engine whose time is in a roofline."""
    name = profile.provenance["engine"]
    whose = "without the time of an engine" if name == "none" else f"with the time of engine {name}"
    parts = [whose + ("" if typed or name == "none" else ", the default")]
    if profile.in_flight > 1:
        parts.append(f"{profile.in_flight} iterations in flight")
    if profile.front_end_s:
        parts.append(f"{duration_text(profile.front_end_s)} per request outside the engine")
    parts += [text for text in (profile.provenance.get("sampling"),) if text]
    return ", ".join(parts)


def accuracy(profile: "Profile", cluster: ClusterSpec, model: "ModelSpec") -> tuple[str, ...]:
    """Return sentences on the errors of rooflines under this engine of this device, by tensor-parallel degree.

    There are none for other profiles. The sentences cover only what was compared: one quantity, engine, device and kind
    of load, and dense models. The last one names figures that were taken over from other devices.
    """
    if profile.source != "roofline" or profile.device == "cpu":
        return ()
    if model.beyond_dense:
        compared: tuple[str, ...] = (_beyond_dense_text(model),)
    else:
        compared = _compared(profile, cluster)
    return (*compared, *_taken_over(cluster))


def _beyond_dense_text(model: "ModelSpec") -> str:
    """Return the sentence on the errors of a model whose layers are not all dense and alike."""
    text = f"accuracy: rooflines of models with {', '.join(model.beyond_dense)} were not compared with measurements"
    if model.experts and not model.latent:
        return (
            f"{text} one by one; over three mixtures of experts on H100, H200 and B200, time per token had a median "
            "error of 15 % (748 measurements), and a mean error of up to 106 % for one engine and device"
        )
    return text


def _taken_over(cluster: ClusterSpec) -> tuple[str, ...]:
    """Return the sentence on the figures of a built-in device that were not measured on it; none if all were."""
    texts = SHEETS[cluster.device.kind].not_compared if is_stock(cluster) else ()
    return (f"not compared on {cluster.device.kind}: {'; '.join(texts)}",) if texts else ()


def _compared(profile: "Profile", cluster: ClusterSpec) -> tuple[str, ...]:
    """Return the sentences on what was compared with measurements."""
    from xprofiler.roofline_errors import COMPARED

    engine, device = profile.provenance["engine"], profile.device
    of_engine = [row for row in COMPARED if row.engine == engine]
    rows = [row for row in of_engine if row.device == device]
    if not of_engine:
        known = " and ".join(dict.fromkeys(row.engine for row in COMPARED))
        return (
            (f"accuracy: rooflines of engine {engine} were not compared with measurements; only those of {known} were"),
        )
    if not rows:
        known = ", ".join(dict.fromkeys(row.device for row in of_engine))
        nothing = (
            f"accuracy: rooflines of engine {engine} were not compared with measurements on {device}, only on {known}"
        )
        return (nothing, *_limits(engine, device))
    if not is_stock(cluster):
        return (
            (
                f"accuracy: rooflines were compared with measurements on {device}, but this cluster has another device "
                "or link"
            ),
        )
    return (_errors_text(rows), *_limits(engine, device))


def _errors_text(rows: "list[RooflineErrors]") -> str:
    """Return the sentence on the errors of one engine and device."""
    from xprofiler.roofline_errors import SOURCES

    first = rows[0]
    off = ", ".join(f"{row.median_error:.0%} at TP{row.tp} ({row.rows})" for row in rows)
    beyond = sum(row.rows * row.beyond_quarter for row in rows) / sum(row.rows for row in rows)
    return (
        f"accuracy: {first.quantity} of engine {first.engine} on {first.device} had median errors of {off}, by "
        f"tensor-parallel degree (number of measurements); source: {SOURCES[first.engine]}, with {first.load}, not "
        f"used for fitting; {beyond:.0%} of the errors exceed a quarter"
    )


def _limits(engine: str, device: str) -> tuple[str, ...]:
    """Return the sentence on known errors; none if there are none."""
    from xprofiler.roofline_errors import LIMITS

    texts = [limit.text for limit in LIMITS if limit.engine in (None, engine) and limit.device in (None, device)]
    return (f"known limits of engine {engine}: {'; '.join(texts)}",) if texts else ()
