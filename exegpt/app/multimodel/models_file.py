"""A models file: which models one cluster is shared out to, and what each is asked for."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from exegpt import document
from exegpt.app.settings import Setting, find_setting
from exegpt.duration import parse_duration
from exegpt.errors import InputError
from exegpt.noun import Noun
from exegpt.trace import parse_rate

MOST_MODELS = 100


@dataclass(frozen=True)
class ModelEntry(Noun):
    """One model in a models file, as it was typed."""

    name: str
    model: str
    workload: str
    rate: str | None = None
    """Of arrival, like 5/s; or `requests`, that are there from the beginning."""
    requests: int | None = None
    latency_bound: str | None = None

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.requests is None):
            raise InputError(f"Model '{self.name}' needs a rate, like 5/s, or a number of requests, and not both.")
        if self.requests is not None and self.requests < 1:
            raise InputError(f"Model '{self.name}' has {self.requests} requests: at least 1.")


@dataclass(frozen=True)
class ModelsFile(Noun):
    """A models file."""

    models: tuple[ModelEntry, ...]

    def __post_init__(self) -> None:
        names = [entry.name for entry in self.models]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice or not 1 <= len(names) <= MOST_MODELS:
            what = f"names {', '.join(twice)} twice" if twice else f"has {len(names)} models, of 1 to {MOST_MODELS}"
            raise InputError(f"A models file {what}: each model needs a name of its own.")


@dataclass(frozen=True)
class Demand:
    """What one model is asked for, on the whole cluster."""

    name: str
    setting: Setting
    rate_seq_s: float | None
    requests: int | None
    bound_s: float | None
    directory: str | None = None
    """Of the model's weights, where it was named by that."""

    def within(self, bound_s: float | None) -> "Demand":
        """The same under another bound in seconds."""
        return replace(self, bound_s=bound_s)

    @property
    def alike(self) -> tuple[object, ...]:
        """Equal for models of which each does what the others do on as many devices."""
        setting = self.setting
        return setting.model, setting.workload, setting.kv_dtype, self.requests, self.bound_s

    @property
    def work(self) -> float:
        """Tokens times parameters, per second or in all: what a share in proportion counts."""
        lengths = self.setting.workload
        tokens = lengths.input.mean + lengths.output.mean
        return (self.rate_seq_s or self.requests or 0) * tokens * self.setting.model.parameters


def read_demands(path: Path, cluster: str, **options: Any) -> tuple[Demand, ...]:
    """What a models file asks for on a cluster; InputError for what can't be read or is unknown. `options` as in
    `find_setting`.
    """
    data = document.read_yaml(path, "models")
    if isinstance(data, dict) and "nodes" in data and "models" not in data:
        raise InputError(f"'{path}' is an application, with nodes: plan it with --method samullm, or name models.")
    file = document.from_dict(ModelsFile, data, f"'{path}'")
    demands = []
    for entry in file.models:
        workload = workload_beside(entry.workload, path.parent)
        try:
            setting = find_setting(entry.model, cluster, workload, **options)
            rate = parse_rate(entry.rate) if entry.rate else None
            bound_s = parse_duration(entry.latency_bound) if entry.latency_bound else None
        except InputError as error:
            raise InputError(f"Model '{entry.name}' of '{path}': {error}") from None
        directory = str(Path(entry.model).resolve()) if Path(entry.model).is_dir() else None
        demands.append(Demand(entry.name, setting, rate, entry.requests, bound_s, directory))
    return tuple(demands)


def workload_beside(text: str, directory: Path) -> str:
    """A trace is looked for beside the models file first."""
    beside = directory / text
    return str(beside) if beside.is_file() else text
