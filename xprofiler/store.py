"""The store of profiles: one file per model, dtype and machine, under the user's cache folder."""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from xcore import document
from xcore.errors import InputError
from xcore.specs.cluster import ClusterSpec
from xcore.specs.model import ModelSpec, usual_kv_dtype
from xcore.specs.profile import Profile
from xprofiler import machine
from xprofiler.points import FEW, FULL, Points

if TYPE_CHECKING:
    import torch

_BUSY = 0.15
"""Spread from which on other programs were running: a quiet machine's spread is below a tenth."""


def facts(
    device: "torch.device | None", points: Points = FULL, *, attention: str = "triton", kv_dtype: str | None = None
) -> dict[str, str]:
    """Return the facts that distinguish the profiles of this machine.

    These are its provenance, with the attention library on a GPU, the points unless all are measured, and the dtype of
    keys and values unless it is that of activations.
    """
    kept = {"kv_dtype": kv_dtype} if kv_dtype == "int8" else {}
    return machine.provenance(device, attention) | ({} if points == FULL else {"points": "few"}) | kept


def find_here(
    model: ModelSpec,
    dtype: str,
    device: "torch.device | None" = None,
    attention: str = "triton",
    kv_dtype: str | None = None,
) -> Profile | None:
    """Return this device's stored profile of a model: of all points, else of few points, else None."""
    full, few = (facts(device, points, attention=attention, kv_dtype=kv_dtype) for points in (FULL, FEW))
    coarse = find(model, dtype, few)
    return find(model, dtype, full) or (coarse if coarse and is_usable(coarse) else None)


def measured_once(cluster: ClusterSpec, dtype: str) -> ClusterSpec:
    """Return the local cluster with the CPU's two rates, measured on first use.

    They are stored, so that equal queries get equal answers.
    """
    path = folder() / f"rates-{document.fingerprint([dtype, sorted(facts(None).items())])}.json"
    if path.is_file():
        try:
            rates = document.read(machine.Rates, path)
        except InputError:  # torn, or of another version
            path.unlink()
            return measured_once(cluster, dtype)
        device = replace(
            cluster.device, bandwidth_bytes_s=rates.bandwidth_bytes_s, flops_s={usual_kv_dtype(dtype): rates.flops_s}
        )
        return replace(cluster, device=device)
    measured = machine.measured(cluster, dtype)
    path.parent.mkdir(parents=True, exist_ok=True)
    document.write(
        path, machine.Rates(measured.device.flops_s[usual_kv_dtype(dtype)], measured.device.bandwidth_bytes_s)
    )
    return measured


def is_coarse(profile: Profile) -> bool:
    """Return whether a profile was measured at few points."""
    return profile.provenance.get("points") == "few"


def is_calm(profile: Profile) -> bool:
    """Return whether a profile's times are those of a quiet machine."""
    return profile.spread < _BUSY


def is_usable(profile: Profile) -> bool:
    """Return whether a stored profile is usable: older versions stored coarse ones from busy machines."""
    return is_calm(profile) or not is_coarse(profile)


def folder() -> Path:
    """Return `$EXEGPT_CACHE/profiles`, by default under `$XDG_CACHE_HOME/exegpt` or `~/.cache/exegpt`."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "exegpt"
    return Path(os.environ.get("EXEGPT_CACHE") or home) / "profiles"


def path_for(model: ModelSpec, dtype: str, machine: dict[str, str]) -> Path:
    """Return the file for a model in a dtype on a machine, distinguished by its provenance.

    The model's name and context don't count.
    """
    return _path_for(model, dtype, machine, ("context", "sorts_logits"))


def _path_for(model: ModelSpec, dtype: str, machine: dict[str, str], without: tuple[str, ...]) -> Path:
    """Return the file by all facts of a model except its name and those in `without`."""
    facts = {name: value for name, value in document.to_dict(replace(model, name="")).items() if name not in without}
    key = document.fingerprint([facts, dtype, sorted(machine.items())])
    return folder() / f"{model.architecture}-{key}.json"


def find(model: ModelSpec, dtype: str, machine: dict[str, str]) -> Profile | None:
    """Return the stored profile, or None.

    A profile that can't be read counts as none. A profile stored before profiles were matched without the context is
    for a model with this context.
    """
    for path in (path_for(model, dtype, machine), _path_for(model, dtype, machine, ("sorts_logits",))):
        try:
            if path.is_file():
                return document.read(Profile, path)
        except InputError:
            continue
    return None


def save(profile: Profile, model: ModelSpec, machine: dict[str, str]) -> Path:
    """Store a profile and return its path."""
    path = path_for(model, profile.dtype, machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    document.write(path, profile)
    return path
