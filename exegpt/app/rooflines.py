"""Unmeasured profiles: the roofline of a named cluster under a named engine, and how far off such were."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from exegpt.errors import InputError

if TYPE_CHECKING:
    from exegpt.cluster import ClusterSpec
    from exegpt.model import ModelSpec
    from exegpt.profile import Profile
    from exegpt.schedule import Schedule

DEFAULT_ENGINE = "vllm"
"""What most people deploy; on this machine our own runner serves, whose time a measured profile has."""


def default_engine(cluster: "ClusterSpec") -> str:
    """The engine that is taken where none is named."""
    return "none" if cluster.is_cpu or cluster.name.startswith("local") else DEFAULT_ENGINE


def stock_profile(
    model: "ModelSpec", cluster: "ClusterSpec", dtype: str, kv_dtype: str | None = None, engine: str | None = None
) -> "Profile":
    """The roofline of a cluster under an engine; this machine's rates are measured once (a second)."""
    from exegpt.engine import find_engine
    from xprofiler import store
    from xprofiler.roofline import roofline_profile

    serving = find_engine(engine or default_engine(cluster))
    known = cluster if cluster.device.flops_s else store.measured_once(cluster, dtype)
    return roofline_profile(model, known, dtype, kv_dtype=kv_dtype, engine=serving)


def like(profile: "Profile", model: "ModelSpec", cluster: "ClusterSpec") -> "Profile":
    """The roofline of another cluster in the dtypes and under the engine of a roofline."""
    facts = profile.provenance
    return stock_profile(model, cluster, profile.dtype, facts["kv_dtype"], facts["engine"])


def found_on(schedule: "Schedule") -> "Profile | None":
    """The roofline that a schedule was found on; None where it is none of a known engine's."""
    return next((p for p in _candidates(schedule) if p.fingerprint == schedule.profile.fingerprint), None)


def _candidates(schedule: "Schedule") -> "Iterator[Profile]":
    from exegpt.engine import ENGINES

    if schedule.profile.source != "roofline":
        return
    for name in dict.fromkeys((default_engine(schedule.cluster), *ENGINES)):
        yield stock_profile(schedule.model.spec, schedule.cluster, schedule.dtype, schedule.kv_dtype, name)


def check_engine(engine: str | None, profile: str | None) -> None:
    """InputError for an engine that is unknown, or beside a profile that has its own engine's time."""
    from exegpt.engine import find_engine

    if engine is None:
        return
    find_engine(engine)
    if profile not in (None, "roofline"):
        raise InputError(
            f"--engine {engine} is for rooflines, and the times of the profile '{profile}' are its own engine's: leave "
            "one of them out."
        )


def engine_text(profile: "Profile", typed: bool = True) -> str:
    """Whose time is in a roofline."""
    name = profile.provenance["engine"]
    if name == "none":
        return "no engine's own time is in it"
    return f"with the time of engine {name}" + ("" if typed else ", the default")


def accuracy(profile: "Profile") -> tuple[str, ...]:
    """A sentence on how far rooflines of this device were off, by tensor-parallel degree; none for other profiles."""
    if profile.source != "roofline" or profile.device == "cpu":
        return ()
    from exegpt.compared import COMPARED, SOURCE

    rows = [row for row in COMPARED if row.device == profile.device]
    if not rows:
        known = ", ".join(dict.fromkeys(row.device for row in COMPARED))
        return (f"accuracy: no published throughput of {profile.device} was compared with rooflines, only of {known}",)
    off = ", ".join(f"{row.median_error:.0%} at TP{row.tp} ({row.rows})" for row in rows)
    beyond = sum(row.rows * row.beyond_quarter for row in rows) / sum(row.rows for row in rows)
    return (
        f"accuracy: rooflines of {profile.device} were off by {off}: medians over so many throughputs of {SOURCE}, "
        f"{beyond:.0%} of them by more than a quarter",
    )
