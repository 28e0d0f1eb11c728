"""Where profiles are kept: one file per model, dtype and machine, under the user's cache folder."""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from exegpt import document
from exegpt.cluster import ClusterSpec
from exegpt.errors import InputError
from exegpt.model import ModelSpec
from exegpt.profile import Profile
from xprofiler import machine
from xprofiler.points import FEW, FULL, Points

if TYPE_CHECKING:
    import torch


def facts(device: "torch.device | None", points: Points = FULL) -> dict[str, str]:
    """What tells apart the profiles that this machine measures: the machine, and the points unless they are all."""
    return machine.provenance(device) | ({} if points == FULL else {"points": "few"})


def find_here(model: ModelSpec, dtype: str, device: "torch.device | None" = None) -> Profile | None:
    """The profile that this machine's device has been measured for, the one of all points rather than that of few."""
    return find(model, dtype, facts(device)) or find(model, dtype, facts(device, FEW))


def measured_once(cluster: ClusterSpec, dtype: str) -> ClusterSpec:
    """The local cluster with the CPU's two rates, measured on first use and kept: the same question gets the same
    answer.
    """
    path = folder() / f"rates-{document.fingerprint([dtype, sorted(facts(None).items())])}.json"
    if path.is_file():
        try:
            rates = document.read(machine.Rates, path)
        except InputError:  # torn, or of another version
            path.unlink()
            return measured_once(cluster, dtype)
        device = replace(cluster.device, bandwidth_bytes_s=rates.bandwidth_bytes_s, flops_s={dtype: rates.flops_s})
        return replace(cluster, device=device)
    found = machine.measured(cluster, dtype)
    path.parent.mkdir(parents=True, exist_ok=True)
    document.write(path, machine.Rates(found.device.flops_s[dtype], found.device.bandwidth_bytes_s))
    return found


def is_coarse(profile: Profile) -> bool:
    """Whether a profile was measured at few points."""
    return profile.provenance.get("points") == "few"


def folder() -> Path:
    """`$EXEGPT_CACHE/profiles`, by default under `$XDG_CACHE_HOME/exegpt` or `~/.cache/exegpt`."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "exegpt"
    return Path(os.environ.get("EXEGPT_CACHE") or home) / "profiles"


def path_for(model: ModelSpec, dtype: str, machine: dict[str, str]) -> Path:
    """The file for a model (whatever its name) in a dtype on a machine, told apart by its provenance."""
    key = document.fingerprint([document.to_dict(replace(model, name="")), dtype, sorted(machine.items())])
    return folder() / f"{model.architecture}-{key}.json"


def find(model: ModelSpec, dtype: str, machine: dict[str, str]) -> Profile | None:
    """The stored profile, or None. One of an older version counts as none."""
    path = path_for(model, dtype, machine)
    if not path.is_file():
        return None
    try:
        return document.read(Profile, path)
    except InputError:
        return None


def save(profile: Profile, model: ModelSpec, machine: dict[str, str]) -> Path:
    """Keep a profile; returns its file."""
    path = path_for(model, profile.dtype, machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    document.write(path, profile)
    return path
