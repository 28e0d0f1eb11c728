"""A models file: which models one cluster is shared out to, and what each is asked for."""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xcore import document
from xcore.errors import InputError
from xcore.noun import Noun

MOST_MODELS = 100
MOST_LETTERS = 200
"""Of a name."""
MOST_REQUESTS = 1_000_000
"""Of one model: each is drawn."""

_EITHER = "Model '{}' needs a rate, like 5/s, or a number of requests, and not both."


@dataclass(frozen=True)
class ModelEntry(Noun):
    """One model in a models file, as it was typed."""

    name: str
    model: str
    workload: str | None = None
    """None, with neither rate nor requests: all three are what an application makes of them."""
    rate: str | None = None
    """Of arrival, like 5/s; or `requests`, that are there from the beginning."""
    requests: int | None = None
    latency_bound: str | None = None
    columns: str | None = None
    """Of the workload's trace, like input=NAME,output=NAME."""

    def __post_init__(self) -> None:
        if self.rate is not None and self.requests is not None:
            raise InputError(_EITHER.format(self.name))
        plain = self.name.isprintable() and self.name.strip() == self.name and not set(self.name) & set("=,")
        if not plain or not 1 <= len(self.name) <= MOST_LETTERS:
            raise InputError(
                f"A model has the name {reprlib.repr(self.name)}: --model NAME=DIR needs 1 to {MOST_LETTERS} letters, "
                "without '=', ',' and line ends, and no space around them."
            )
        check_requests(f"Model '{self.name}'", self.requests)


def check_requests(what: str, requests: int | None) -> None:
    """Raise InputError for too few or too many; `what` has them."""
    if requests is not None and not 1 <= requests <= MOST_REQUESTS:
        raise InputError(f"{what} has {requests:,} requests: at least 1, at most {MOST_REQUESTS:,}.")


@dataclass(frozen=True)
class ModelsFile(Noun):
    """A models file."""

    models: tuple[ModelEntry, ...]
    applications: str | None = None
    """An application file beside it, whose calls some of the models have."""

    def __post_init__(self) -> None:
        if self.applications is None:
            self.check({})
        names = [entry.name for entry in self.models]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InputError(
                f"A models file names {', '.join(map(repr, twice))} twice: each model needs a name of its own."
            )
        if not 1 <= len(names) <= MOST_MODELS:
            raise InputError(f"A models file has {len(names)} models: name 1 to {MOST_MODELS}.")

    def check(self, called: Mapping[str, object]) -> None:
        """Raise InputError for a model without requests, or with such beside those that an application makes of it."""
        for entry in self.models:
            asked = entry.rate is not None or entry.requests is not None
            if entry.name in called and (asked or entry.workload is not None):
                raise InputError(
                    f"Model '{entry.name}' has the calls of '{self.applications}': leave its workload, rate and "
                    "requests out."
                )
            if entry.name not in called and not asked:
                raise InputError(_EITHER.format(entry.name))
            if entry.name not in called and entry.workload is None:
                raise InputError(f"Model '{entry.name}' needs a workload, like S or 128/64, or a trace.")


def is_application(data: Any) -> bool:
    """Return whether a file's content is an application's rather than models'."""
    return isinstance(data, dict) and "nodes" in data and "models" not in data


def read_models(path: Path) -> ModelsFile:
    """Return a models file as it was typed; InputError for what can't be read."""
    data = document.read_yaml(path, "models")
    if is_application(data):
        raise InputError(f"'{path}' is an application, with nodes: plan it with --method samullm, or name models.")
    check_units(data, "models", {"rate": "/s", "latency_bound": "s"}, path)
    return document.from_dict(ModelsFile, data, f"'{path}'")


def check_units(data: Any, listed: str, units: Mapping[str, str], path: Path) -> None:
    """Raise InputError for a bare number where an entry of the list `listed` needs one with a unit, by key."""
    entries = data.get(listed) if isinstance(data, dict) else None
    for place, entry in enumerate(entries if isinstance(entries, list) else ()):
        for key, unit in units.items() if isinstance(entry, dict) else ():
            value = entry.get(key)
            if isinstance(value, int | float) and not isinstance(value, bool):
                raise InputError(
                    f"'{path}': {listed}.{place}.{key} is {value}, without a unit: write 5{unit}, for example."
                )


def profiles_by_model(typed: Sequence[str], names: Sequence[str], path: Path) -> dict[str, str]:
    """Return what `--profile` says for each model of the file `path`: texts NAME=FILE, several between commas or one by
    one; `roofline` alone is for all models, and a FILE alone for the only one.

    Raises InputError for a name that the file doesn't have, for a model with two, and for a FILE of no model.
    """
    has = f"'{path}' has {', '.join(names)}"
    profiles: dict[str, str] = {}
    for text in (part for texts in typed for part in _parts(texts)):
        name, equals, file = text.partition("=")
        if not equals and (text == "roofline" or len(names) == 1):
            files = dict.fromkeys(names, text)
        elif not (name and equals and file):
            raise InputError(f"--profile {text} names no model, and {has}: pass --profile NAME=FILE.")
        elif name not in names:
            raise InputError(f"--profile {text} is of no model of the file: {has}.")
        else:
            files = {name: file}
        for model in sorted(files.keys() & profiles.keys()):
            raise InputError(
                f"--profile is given twice for model '{model}', as '{profiles[model]}' and as '{files[model]}': leave "
                "one of them out."
            )
        profiles |= files
    return profiles


def _parts(texts: str) -> list[str]:
    """Return the texts between commas where each names a model; a file's name may have commas."""
    parts = texts.split(",")
    return parts if all("=" in part for part in parts) else [texts]


def workload_beside(text: str, directory: Path) -> str:
    """Return a trace is looked for beside the models file first."""
    beside = directory / text
    return str(beside) if beside.is_file() else text
