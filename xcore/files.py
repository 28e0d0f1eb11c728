"""Files that commands read and write: unusable files are refused before any work begins."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from xcore import document
from xcore.errors import InputError
from xcore.policies.from_schedule import checked
from xcore.specs.schedule import Schedule
from xcore.specs.schedule_versions import VERSIONS


def model_directory(text: str) -> Path:
    """Return the directory of a model whose weights are needed."""
    if Path(text).exists() and not Path(text).is_dir():
        raise InputError(f"'{text}' is not a directory: pass the directory that has the model's config.json.")
    if not Path(text).is_dir():
        raise InputError(f"There is no model directory '{text}': create it with `exegpt model create {text}`.")
    return Path(text)


def read_schedule(path: Path) -> Schedule:
    """Read a schedule from its file; another version is refused before other keys are checked."""
    data = document.read_json(path)
    version = data.get("version") if isinstance(data, dict) else None
    if isinstance(data, dict) and {"schedule", "frontier"} & data.keys():
        raise InputError(
            f"'{path}' is the output of --json, not a schedule file: write a schedule with `exegpt tune --out FILE`."
        )
    document.check_kind(data, Schedule.__name__, path)
    if version not in VERSIONS:
        read = " or ".join(map(str, VERSIONS))
        raise InputError(
            f"'{path}' has schedule version {version!r}, but this version of exegpt reads version {read}: run "
            "`exegpt tune` again."
        )
    schedule = document.from_dict(Schedule, data, f"'{path}'")
    try:
        checked(schedule).check_stages()
    except InputError as error:
        raise InputError(f"'{path}': {error}") from None
    needed = sum(stage.tp for stage in schedule.stages) * schedule.replicas
    if needed > schedule.cluster.devices:
        has = f"its cluster '{schedule.cluster.name}' has {schedule.cluster.devices:,}"
        raise InputError(f"The schedule in '{path}' needs {needed:,} devices, but {has}: run `exegpt tune` again.")
    return schedule


def check_output(path: Path | None) -> None:
    """Raise InputError before the work begins if its result can't be written to `path`."""
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"'{path}' is a folder: name a file in it.")
    if path.exists() and not path.is_file():  # the rename would replace it, such as /dev/null
        raise InputError(f"'{path}' is a device or a pipe: name a regular file, or remove the option.")
    if not path.parent.is_dir():
        raise InputError(f"There is no folder '{path.parent}' for the file '{path.name}': create the folder first.")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise InputError(f"'{path}' can't be written ({why}): choose a file in another folder.") from None


def check_distinct(outputs: Sequence[Path | None], sources: Sequence[str | Path | None]) -> None:
    """Raise InputError if an output would replace a file that is read, or another output."""
    named = [path for path in outputs if path is not None]
    if not named:
        return
    taken = {Path(source).resolve() for source in sources if source is not None and Path(source).is_file()}
    for path in named:
        if path.resolve() in taken:
            raise InputError(f"'{path}' is used twice in this command and would be overwritten: choose another file.")
        taken.add(path.resolve())
