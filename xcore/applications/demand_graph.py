"""Demand graph: the calls of an application's runs, one sampled record per call (Hermes' PDGraph)."""

import math
from dataclasses import dataclass
from pathlib import Path

from xcore import document
from xcore.errors import InputError
from xcore.spec import Spec
from xcore.specs.workload import MAX_TOKENS

END = "end"
"""The next unit of a run's last call."""
LLM = "llm"
"""The backend of units whose demand is tokens."""
MOST_SAMPLES = 1000
"""Most samples of a unit, of a pair of units and of first units: older ones are dropped."""


@dataclass(frozen=True)
class DemandStep(Spec):
    """A step of an application: samples of its calls, the oldest first."""

    name: str
    backend: str
    """`llm`, or the kind of container that it needs, such as `docker`."""
    next_units: tuple[str, ...]
    """The unit that followed, or `end`."""
    input_tokens: tuple[int, ...] = ()
    """Input tokens of each parallel request; the i-th values of this and the next two are of the same call."""
    output_tokens: tuple[int, ...] = ()
    parallel: tuple[int, ...] = ()
    """Requests that one call of an LLM unit sends at once."""
    seconds: tuple[float, ...] = ()
    """Durations of calls on other backends."""

    def __post_init__(self) -> None:
        llm = self.backend == LLM
        lists = (self.input_tokens, self.output_tokens, self.parallel)
        if llm != bool(self.input_tokens) or len({*map(len, lists)}) > 1 or llm == bool(self.seconds):
            raise InputError(
                f"Unit '{self.name}' on {self.backend} needs equally many input_tokens, output_tokens and parallel "
                f"if it is an LLM, otherwise only seconds (got {len(lists[0])}, {len(lists[1])}, {len(lists[2])} "
                f"and {len(self.seconds)})."
            )
        for key, least in (("input_tokens", 0), ("output_tokens", 0), ("parallel", 1)):
            if (lowest := min(getattr(self, key), default=least)) < least:
                raise InputError(
                    f"Unit '{self.name}' has {key} of {lowest}, below the minimum of {least}: remove that sample."
                )
        if max((*self.input_tokens, *self.output_tokens, *self.parallel, 0)) > MAX_TOKENS:
            raise InputError(f"Unit '{self.name}' has a sample above the maximum of {MAX_TOKENS:,}: remove it.")
        if not all(0 <= s < math.inf for s in self.seconds):
            raise InputError(f"Unit '{self.name}' has seconds that are negative or infinite: remove that sample.")
        if not self.next_units or max(map(len, (*lists, self.seconds, self.next_units))) > MOST_SAMPLES:
            raise InputError(
                f"Unit '{self.name}' needs 1 to {MOST_SAMPLES:,} samples of its demand and of its next unit."
            )


@dataclass(frozen=True)
class JointRecords(Spec):
    """Records of two LLM units of which one follows the other: both calls of a run.

    There may be calls on other backends in between.
    """

    upstream: str
    downstream: str
    records: tuple[tuple[int, int, int, int, int, int], ...]
    """Input tokens, output tokens and parallel requests upstream, then downstream."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.records) <= MOST_SAMPLES:
            raise InputError(
                f"'{self.upstream}' and '{self.downstream}' have {len(self.records)} joint records: keep from 1 to "
                f"{MOST_SAMPLES:,}."
            )


@dataclass(frozen=True)
class DemandGraph(Spec):
    """An application's units.

    Walks may return to a unit; each unit must have a way to the end.
    """

    version: int
    application: str
    start: tuple[str, ...]
    """The first unit of each sampled run."""
    units: tuple[DemandStep, ...]
    joint: tuple[JointRecords, ...] = ()

    VERSION = 1

    def __post_init__(self) -> None:
        if self.version != DemandGraph.VERSION:
            raise InputError(
                f"This demand graph has version {self.version}, but this version of exegpt reads version "
                f"{DemandGraph.VERSION}: learn it again."
            )
        names = [unit.name for unit in self.units]
        if len(set(names)) < len(names) or END in names or not 1 <= len(self.start) <= MOST_SAMPLES:
            raise InputError(
                f"The application '{self.application}' needs units with unique names other than '{END}', and 1 to "
                f"{MOST_SAMPLES:,} first units."
            )
        self._check_next(names)
        self._check_end()
        for pair in self.joint:
            if not {pair.upstream, pair.downstream} <= {unit.name for unit in self.units if unit.backend == LLM}:
                raise InputError(
                    f"The application '{self.application}' has joint records of '{pair.upstream}' and "
                    f"'{pair.downstream}', but they must both be LLM units of the application."
                )

    def _check_next(self, names: list[str]) -> None:
        nexts = [("start", name) for name in self.start]
        nexts += [(unit.name, name) for unit in self.units for name in unit.next_units]
        for unit, name in nexts:
            if name not in names and (name != END or unit == "start"):
                raise InputError(
                    f"The application '{self.application}' goes from '{unit}' to '{name}', which is not one of its "
                    f"units: write one of {', '.join(names)}{'' if unit == 'start' else f' or {END}'}."
                )

    def _check_end(self) -> None:
        """Check that every unit can lead to the end.

        Raises:
            InputError: A unit never leads to the end.
        """
        ending: set[str] = {END}
        while more := {u.name for u in self.units if u.name not in ending and not ending.isdisjoint(u.next_units)}:
            ending |= more
        for unit in self.units:
            if unit.name in ending:
                continue
            walk = [unit.name]
            following = {u.name: set(u.next_units) for u in self.units}
            while len(following[walk[-1]]) == 1 and walk[-1] not in walk[:-1]:
                walk += following[walk[-1]]
            if len(walk) > 1 and walk[-1] in walk[:-1]:
                cycle = " → ".join(walk[walk.index(walk[-1]) :])
                why = f"always repeats the cycle {cycle}"
            else:
                why = f"has no path from '{unit.name}' to '{END}'"
            raise InputError(
                f"The application '{self.application}' {why}: write '{END}' as the next unit of at least one call "
                "there."
            )

    def unit(self, name: str) -> DemandStep:
        """Return a unit by its name.

        Raises:
            KeyError: There is no such unit.
        """
        return {unit.name: unit for unit in self.units}[name]


def read_demand_graphs(path: Path) -> tuple[DemandGraph, ...]:
    """Read the graphs in a JSON file: one graph, a list of graphs, or the format that Hermes' repository publishes.

    Hermes' format is by application.

    Raises:
        InputError: The file has another format, or a graph in which no run could end.
    """
    data, what = document.read_json(path), f"'{path}'"
    if isinstance(data, list):
        return tuple(document.from_dict(DemandGraph, entry, what) for entry in data)
    if isinstance(data, dict) and "version" in data:
        return (document.from_dict(DemandGraph, data, what),)
    if not isinstance(data, dict) or not data:
        raise InputError(
            f"{what} has no demand graphs: write one, a list of them, or a mapping from applications' names to them."
        )
    return tuple(_published(name, units, what) for name, units in data.items())


def _published(name: str, units: object, what: str) -> DemandGraph:
    """Return a graph from units by name with `type`, `next` and samples; `start` and `end` have no samples."""
    if not isinstance(units, dict) or not all(isinstance(unit, dict) for unit in units.values()):
        raise InputError(f"{what}: the application '{name}' must be a group of units.")
    if not isinstance(units.get("start"), dict) or END not in units:
        raise InputError(f"{what}: the application '{name}' needs a unit 'start' and a unit '{END}'.")
    keys = {"type": "backend", "next": "next_units", "input_len": "input_tokens", "output_len": "output_tokens"}
    keys |= {"parallelism": "parallel", "exec_time": "seconds"}
    plain = [
        {"name": unit, **{keys.get(key, key): value for key, value in samples.items()}}
        for unit, samples in units.items()
        if unit not in ("start", END)
    ]
    graph = {"version": DemandGraph.VERSION, "application": name, "start": units["start"].get("next"), "units": plain}
    return document.from_dict(DemandGraph, graph, what)
