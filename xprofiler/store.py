"""Where profiles are kept: one file per model, dtype and machine, under the user's cache folder."""

import os
from dataclasses import replace
from pathlib import Path

from exegpt import document
from exegpt.errors import InputError
from exegpt.model import ModelSpec
from exegpt.profile import Profile


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
