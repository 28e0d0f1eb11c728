"""Profiles for models on clusters: from a file, from this machine's store, measured at a few points, or a roofline."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from xcore.duration import duration_text, parse_delay
from xcore.errors import InputError
from xcore.specs.cluster import ClusterSpec
from xcore.specs.device_names import device_kind
from xcore.specs.model import ModelSpec
from xcore.specs.profile import Profile
from xcore.specs.schedule import Schedule
from xprofiler import rooflines

if TYPE_CHECKING:
    import torch

    from xprofiler.job import ProfilingJob
    from xrunner.comm.ranks import Ranks

_ROOFLINE_HERE = (
    "it uses this machine's two peak rates, without the losses of kernels and the time of an engine: it compares "
    "schedules, but does not promise times (a small model's run can take ten times as long); `exegpt profile` "
    "measures real times"
)


def find_profile(
    text: str | None,
    model: ModelSpec,
    cluster: ClusterSpec,
    dtype: str | None,
    *,
    kv_dtype: str | None = None,
    engine: str | None = None,
    attention: str = "triton",
    front_end: str | None = None,
) -> tuple[Profile, str]:
    """Return `_find_profile`'s result, with `front_end` (a duration as text) instead of its engine's front-end time."""
    seconds = None if front_end is None else parse_delay(front_end, "--front-end")
    profile, which = _find_profile(text, model, cluster, dtype, kv_dtype, engine, attention, seconds)
    if seconds is None or profile.front_end_s == seconds:
        return profile, which
    return replace(profile, front_end_s=seconds), f"{which}; --front-end adds {duration_text(seconds)} to each request"


def _find_profile(
    text: str | None,
    model: ModelSpec,
    cluster: ClusterSpec,
    dtype: str | None,
    kv_dtype: str | None,
    engine: str | None,
    attention: str,
    front_end_s: float | None,
) -> tuple[Profile, str]:
    """Return the profile that `--profile` names (None: the stored one, else the roofline), and a text that names it.

    Without a dtype, a file's profile has the file's dtype. An `engine` is only for a roofline or imported kernels: a
    profile that was measured with another engine is refused. A stored profile was measured with the same `attention`;
    the text names a file's attention if it differs.
    """
    rooflines.check_engine(engine)
    if text is not None and text != "roofline":
        read = _profile_from_file(text, model, dtype)
        rooflines.check_engine(engine, read, text)
        notes = f"{_device_note(read, cluster)}{_attention_note(read, attention)}"
        if engine is None or read.source != "operators":
            return read, f"profile: '{text}'{notes}"
        return _under(engine, read, model, cluster), f"profile: '{text}'{notes}, with the time of engine {engine}"
    assert dtype, "only files know their own"
    from xprofiler import machine, store

    here = machine.which(cluster) if cluster.name.startswith("local") else None
    if here and text is None:
        stored = store.find_here(model, dtype, here, attention, kv_dtype)
        if stored:
            rooflines.check_engine(engine, stored, stored.fingerprint)
            return stored, profile_text(stored)
    roofline = rooflines.stock_profile(model, cluster, dtype, kv_dtype, engine, front_end_s)
    why = "" if text else ", because no measured profile fits this model, cluster and dtype"
    whose = _ROOFLINE_HERE if here and engine is None else rooflines.engine_text(roofline, engine is not None)
    return roofline, f"profile: roofline{why}; {whose}"


def _under(engine: str, profile: Profile, model: ModelSpec, cluster: ClusterSpec) -> Profile:
    from xcore.specs.engine_spec import find_engine
    from xprofiler.operators import with_engine

    return with_engine(profile, model, cluster, find_engine(engine))


def as_found(profile: Profile, schedule: Schedule, engine: str | None = None) -> tuple[Profile, str]:
    """Return the profile with the time of the engine with which a schedule was found, and a sentence on it.

    Imported kernels get that engine's time, unless the user named an `engine`. The sentence names the engine, or says
    that the schedule was found with another profile; it is empty for the schedule's own profile.
    """
    from xcore.specs.engine_spec import ENGINES

    searched = schedule.profile
    if profile.fingerprint == searched.fingerprint:
        return profile, ""
    if engine is None and profile.source == searched.source == "operators":
        for name in ENGINES:
            served = _under(name, profile, schedule.model.spec, schedule.cluster)
            if served.fingerprint == searched.fingerprint:
                return served, f"profile: it includes the time of engine {name}, as in the search for the schedule"
    other = f"another profile, {searched.source} ({searched.fingerprint})"
    return profile, (
        f"profile: the schedule was found with {other}; pass that profile as --profile FILE for the same figures"
    )


def _device_note(profile: Profile, cluster: ClusterSpec) -> str:
    """Return a note if a profile was measured on other devices than those of the cluster.

    It is empty if the devices are the same, by any name.
    """
    try:
        kind = device_kind(profile.device).kind
    except InputError:
        kind = profile.device
    if cluster.name.startswith("local") or kind == cluster.device.kind:
        return ""
    return f", measured on {kind}, not on {cluster.device.kind}"


def _attention_note(profile: Profile, attention: str) -> str:
    """Return a note if a profile's attention differs from that of the run; empty if it is equal or unknown."""
    measured = profile.provenance.get("attention")
    if measured is None or measured.split()[0] == attention:
        return ""
    return f", measured with {measured} attention, not with {attention}"


def _spread_note(profile: Profile) -> str:
    """Return a warning for a profile whose times varied much while they were measured; else an empty text."""
    from xprofiler.store import is_calm, is_coarse

    if is_calm(profile):
        return ""
    once = ", and it is used for this run only" if is_coarse(profile) else ""
    return (
        f"; its times vary by {profile.spread:.0%}, because the machine was busy{once}: run `exegpt profile` when the "
        "machine is idle"
    )


def _profile_from_file(path: str, model: ModelSpec, dtype: str | None) -> Profile:
    from xcore import document

    profile = document.read(Profile, path)
    if not profile.is_for(model):
        raise InputError(
            f"The profile '{path}' is for another model than '{model.name}': run `exegpt profile` for this model."
        )
    if dtype not in (None, profile.dtype):
        raise InputError(f"The profile '{path}' is in {profile.dtype}, not in {dtype}: pass --dtype {profile.dtype}.")
    return profile


def measured_profile(
    directory: Path,
    dtype: str,
    ranks: "Ranks",
    device: "torch.device",
    attention: str,
    say: Callable[[str], None] = lambda text: None,
    *,
    kv_dtype: str | None = None,
) -> "ProfilingJob":
    """Return the ranks' cluster and its profile: stored, else measured now at few points, with a progress bar.

    All ranks call it alike, and all get the result. The first rank also passes its progress to `say`, as a text.
    """
    from xcore.console import output
    from xprofiler.job import measured_job

    first = ranks.rank == 0
    with output.progress("measuring a few points") if first else nullcontext(lambda done, total: None) as progress:

        def measured(_: str, done: int, total: int) -> None:
            if first and done == 1:
                output.note(
                    f"measuring this machine for {directory.resolve().name}: {total} points, once for all starts"
                )
            progress(done, total)
            if first:
                say(f"measuring this machine, {done} of {total} points")

        return measured_job(directory, dtype, ranks, device, measured, attention, kv_dtype)


def profile_text(profile: Profile) -> str:
    """Return a text that names a measured profile, and says how to measure a better one."""
    from xprofiler.store import is_coarse

    coarse = is_coarse(profile)
    where = f"measured on this machine{' at a few points' if coarse else ''} ({profile.fingerprint})"
    return f"profile: {where}{'; `exegpt profile` measures all' if coarse else ''}{_spread_note(profile)}"
