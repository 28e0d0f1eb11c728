"""A models file: the models that share one cluster, and the requests for each."""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from xcore import document
from xcore.errors import InputError
from xcore.spec import Spec

MOST_MODELS = 100
MOST_LETTERS = 200
"""Most letters of a name."""
MOST_REQUESTS = 1_000_000
"""Most requests of one model: each is drawn."""

_EITHER = "Model '{}' needs a rate, like 5/s, or a number of requests, but not both."


@dataclass(frozen=True)
class ModelEntry(Spec):
    """One model in a models file, as the user typed it."""

    name: str
    model: str
    workload: str | None = None
    """None, without rate and requests: an application determines all three."""
    rate: str | None = None
    """Arrival rate, like 5/s; or `requests`, which are there from the beginning."""
    requests: int | None = None
    latency_bound: str | None = None
    columns: str | None = None
    """Column names of the workload's trace, like input=NAME,output=NAME."""

    def __post_init__(self) -> None:
        if self.rate is not None and self.requests is not None:
            raise InputError(_EITHER.format(self.name))
        plain = self.name.isprintable() and self.name.strip() == self.name and not set(self.name) & set("=,")
        if not plain or not 1 <= len(self.name) <= MOST_LETTERS:
            raise InputError(
                f"A model has the name {reprlib.repr(self.name)}: a name in --model NAME=DIR has 1 to "
                f"{MOST_LETTERS} letters, without '=', ',' or line ends, and without spaces around it."
            )
        check_requests(f"Model '{self.name}'", self.requests)


def check_requests(what: str, requests: int | None) -> None:
    """Check a number of requests; `what` begins the error's sentence.

    Raises:
        InputError: There are too few or too many.
    """
    if requests is not None and not 1 <= requests <= MOST_REQUESTS:
        raise InputError(f"{what} has {requests:,} requests: it must have 1 to {MOST_REQUESTS:,}.")


@dataclass(frozen=True)
class ModelsFile(Spec):
    """A models file."""

    models: tuple[ModelEntry, ...]
    applications: str | None = None
    """An application file in the same folder, whose calls go to some of the models."""

    def __post_init__(self) -> None:
        if self.applications is None:
            self.check({})
        names = [entry.name for entry in self.models]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InputError(
                f"A models file names {', '.join(map(repr, twice))} twice: each model needs a unique name."
            )
        if not 1 <= len(names) <= MOST_MODELS:
            raise InputError(f"A models file has {len(names)} models: write 1 to {MOST_MODELS}.")

    def check(self, called: Mapping[str, object]) -> None:
        """Check the models' requests, given the models that an application calls.

        Raises:
            InputError: A model has no requests, or has its own in addition to an application's.
        """
        for entry in self.models:
            asked = entry.rate is not None or entry.requests is not None
            if entry.name in called and (asked or entry.workload is not None):
                raise InputError(
                    f"Model '{entry.name}' takes its calls from '{self.applications}': leave out its workload, rate "
                    "and requests."
                )
            if entry.name not in called and not asked:
                raise InputError(_EITHER.format(entry.name))
            if entry.name not in called and entry.workload is None:
                raise InputError(f"Model '{entry.name}' needs a workload, like S or 128/64, or a trace file.")


def is_application(data: object) -> bool:
    """Return whether a file's content is an application's rather than a models file's."""
    return isinstance(data, dict) and "nodes" in data and "models" not in data


def read_models(path: Path) -> ModelsFile:
    """Read a models file as it was typed.

    Raises:
        InputError: The file can't be read.
    """
    data = document.read_yaml(path, "models")
    if is_application(data):
        raise InputError(
            f"'{path}' is an application file with nodes: plan it with --method samullm, or write a models file."
        )
    kind = document.kind_of(data)
    if kind and (kind != "Plan" or (isinstance(data, dict) and "cluster" in data)):
        raise InputError(
            f"'{path}' is a {document.kind_text(kind)}, not a models file: write one with the models, their workloads "
            "and rates."
        )
    check_units(data, "models", {"rate": "/s", "latency_bound": "s"}, path)
    return document.from_dict(ModelsFile, data, f"'{path}'")


def check_units(data: object, listed: str, units: Mapping[str, str], path: Path) -> None:
    """Check that entries of the list `listed` have units, by key.

    Raises:
        InputError: A value is a bare number.
    """
    entries = data.get(listed) if isinstance(data, dict) else None
    for place, entry in enumerate(entries if isinstance(entries, list) else ()):
        for key, unit in units.items() if isinstance(entry, dict) else ():
            value = entry.get(key)
            for number in value.values() if isinstance(value, dict) else (value,):
                if isinstance(number, int | float) and not isinstance(number, bool):
                    raise InputError(
                        f"'{path}': {listed}.{place}.{key} is {number}, which has no unit: write 5{unit}, for example."
                    )


def profiles_by_model(typed: Sequence[str], names: Sequence[str], path: Path) -> dict[str, str]:
    """Return the `--profile` text for each model of the file `path`.

    Texts are NAME=FILE, one each or several separated by commas. `roofline` alone is for all models; a FILE alone is
    for the only model.

    Raises:
        InputError: A name is not in the file, a model has two profiles, or a FILE is of no model.
    """
    has = f"'{path}' has {', '.join(names)}"
    profiles: dict[str, str] = {}
    for text in (part for texts in typed for part in _parts(texts)):
        name, equals, file = text.partition("=")
        if not equals and (text == "roofline" or len(names) == 1):
            files = dict.fromkeys(names, text)
        elif not (name and equals and file):
            raise InputError(f"--profile {text} names no model, but {has}: pass --profile NAME=FILE.")
        elif name not in names:
            raise InputError(f"--profile {text} names no model of the file, and {has}.")
        else:
            files = {name: file}
        for model in sorted(files.keys() & profiles.keys()):
            raise InputError(
                f"--profile is passed twice for model '{model}', as '{profiles[model]}' and as '{files[model]}': "
                "leave one of them out."
            )
        profiles |= files
    return profiles


def _parts(texts: str) -> list[str]:
    """Split the texts at commas if each part names a model; a file's name may have commas."""
    parts = texts.split(",")
    return parts if all("=" in part for part in parts) else [texts]


def workload_beside(text: str, directory: Path) -> str:
    """Return the workload's text, or the path of a trace with this name in the models file's folder."""
    beside = directory / text
    return str(beside) if beside.is_file() else text
