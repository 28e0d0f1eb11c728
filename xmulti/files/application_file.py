"""An application file: models whose calls read each other's outputs, planned in stages on one node."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from xcore import document
from xcore.duration import parse_duration
from xcore.errors import InputError
from xcore.spec import Spec
from xcore.specs.cluster import ClusterSpec
from xcore.specs.cost_table import CostTable, ModelCosts, read_cost_table
from xcore.specs.workload import LengthDistribution
from xmulti.files.call_graph import CallGraph, GraphEdge, GraphNode
from xmulti.files.models_file import ModelsFile, check_requests, check_units, profiles_by_model, workload_beside
from xscheduler.settings import Setting, find_setting

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from xscheduler.settings import SettingKeywords


Model = TypeVar("Model")

LOAD_BYTES_S = 0.87e9
"""Loading rate of a GPU, including the engine's start: SamuLLM's host loads vicuna-13b, 26 GB, in 30 s."""
CPU_START_S = 7.0
"""Start of an engine on CPUs, without reading its weights.

Measured on the machine of docs/measurements.md (`benchmarks.stages`).
"""


@dataclass(frozen=True)
class ApplicationNode(Spec):
    """One node of an application file, as the user typed it."""

    name: str
    model: str
    workload: str
    requests: int | None = None
    """Number of own calls.

    None: its calls come only from other nodes, and the workload's inputs are their instructions.
    """
    rounds: int | tuple[int, ...] | None = None
    """Rounds of each call, if an edge leads from the node to itself."""
    outputs: str | None = None
    """A file of output lengths (`exegpt outputs learn`), instead of the workload's."""
    longest_output: int | None = None
    times: int = 1
    load: str | dict[int, str] | None = None
    """Loading time of a replica, like 30s; by its number of GPUs, like {1: 30s, 2: 18s}."""
    prompts: str | None = None
    """A JSONL file with the beginnings of its own calls' prompts, for `exegpt run`; None: random prompts."""
    instructions: str | None = None
    """A text that is in all its prompts, for `exegpt run`."""

    def __post_init__(self) -> None:
        if self.prompts is not None and (self.requests is not None or self.rounds is not None):
            raise InputError(f"Node '{self.name}' has prompts in '{self.prompts}': leave out its requests and rounds.")
        check_requests(f"Node '{self.name}'", self.requests)
        if self.rounds is not None and self.requests is None:
            raise InputError(f"Node '{self.name}' has rounds, so it also needs its own requests.")
        fewest = min(self.rounds, default=0) if isinstance(self.rounds, tuple) else self.rounds
        if fewest is not None and fewest < 1:
            raise InputError(f"Node '{self.name}' has rounds of {fewest}: the number must be at least 1.")
        if isinstance(self.load, dict) and min(self.load, default=0) < 1:
            raise InputError(
                f"Node '{self.name}' has a load of {self.load}: write a loading time for each number of GPUs, like "
                "{1: 30s, 2: 18s}."
            )
        for load in self.load.values() if isinstance(self.load, dict) else (self.load,):
            if load is not None and parse_duration(load) is None:
                raise InputError(f"Node '{self.name}' has a load of {load}: write the loading time, like 30s.")

    def typed_load_s(self, tp: int) -> float | None:
        """Return the loading time of a replica on `tp` GPUs in seconds; None: not given."""
        text = self.load.get(tp) if isinstance(self.load, dict) else self.load
        return None if text is None else parse_duration(text)


@dataclass(frozen=True)
class CallLine(Spec):
    """A line of a node's prompts: one call, with the beginning of each round's prompt."""

    prompt: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    prompts: tuple[str, ...] | None = None
    prompts_ids: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        given = [part for part in (self.prompt, self.prompt_ids, self.prompts, self.prompts_ids) if part is not None]
        if len(given) != 1 or not given[0] or not all(self.parts):
            raise InputError(
                "a call needs exactly one of prompt, prompt_ids, prompts and prompts_ids, and no text may be empty"
            )

    @property
    def parts(self) -> "tuple[str, ...] | tuple[tuple[int, ...], ...]":
        """The texts or token ids, by round."""
        if self.prompt is not None:
            return (self.prompt,)
        return self.prompts or self.prompts_ids or (self.prompt_ids or (),)


def read_call_lines(path: Path) -> list[CallLine]:
    """Read a node's calls from JSONL.

    Raises:
        InputError: A line is wrong; the message names it.
    """
    calls = []
    for number, line in enumerate(document.read_lines(path, "file of prompts"), 1):
        if line.strip():
            where = f"'{path}', line {number}"
            calls.append(document.from_dict(CallLine, document.parse_json(line, f"{where},"), where))
    if not calls:
        raise InputError(f"'{path}' has no prompts: write one JSON object per line.")
    return calls


@dataclass(frozen=True)
class ApplicationFile(Spec):
    """An application file."""

    nodes: tuple[ApplicationNode, ...]
    edges: tuple[GraphEdge, ...] = ()
    linked: int | None = None
    """Number of GPUs that are linked directly, the limit of a tensor-parallel group; None: all GPUs of the node."""

    def __post_init__(self) -> None:
        if self.linked is not None and self.linked < 1:
            raise InputError(f"An application has linked = {self.linked}: it must be at least 1 GPU.")


def graph_of(path: Path, nodes: Sequence[GraphNode], edges: Sequence[GraphEdge]) -> CallGraph:
    """Return the call graph of an application's file.

    Raises:
        InputError: No run can follow the edges; the message names the file.
    """
    try:
        return CallGraph(tuple(nodes), tuple(edges))
    except InputError as error:
        raise InputError(f"'{path}': {error}") from None


def model_for(entry: ApplicationNode, by_name: Mapping[str, Model], without: str) -> Model:
    """Return the model that has a node's name, or that the node names.

    Raises:
        InputError: There is no such model (the message begins with `without`), or there are two.
    """
    called, named = by_name.get(entry.name), by_name.get(entry.model)
    if called and named and called is not named:
        raise InputError(
            f"Node '{entry.name}' has the name of one model, but names another model, '{entry.model}': rename the node."
        )
    model = called or named
    if model is None:
        raise InputError(f"{without}: call it one of {', '.join(by_name)}.")
    return model


@dataclass(frozen=True)
class ApplicationPlanRequest:
    """The contents of an application file: the request for a plan."""

    graph: CallGraph
    table: CostTable
    cluster: ClusterSpec
    linked: int
    assumptions: tuple[str, ...]
    settings: Mapping[str, Setting]
    """By node: its setting."""
    directories: Mapping[str, str | None]
    """By node: the directory of its weights, if its model was named by it."""


def read_application_file(path: Path) -> ApplicationFile:
    """Read an application file as it was typed.

    A models file whose models all have requests is an application without edges.
    """
    data = document.read_yaml(path, "application")
    check_units(data, "nodes", {"load": "s"}, path)
    if isinstance(data, dict) and "models" in data:
        return _without_edges(document.from_dict(ModelsFile, data, f"'{path}'"), path)
    return document.from_dict(ApplicationFile, data, f"'{path}'")


def read_application(
    path: Path, cluster: str, *, profile: Sequence[str] = (), **options: "Unpack[SettingKeywords]"
) -> ApplicationPlanRequest:
    """Read the request of an application file for a plan on a cluster, or a models file whose models all have requests.

    `profile` as in `profiles_by_model`, `options` as in `find_setting`.

    Raises:
        InputError: The file can't be read or planned.
    """
    file = read_application_file(path)
    profiles = profiles_by_model(profile, [entry.name for entry in file.nodes], path)
    nodes, models, assumptions = [], [], []
    settings: dict[str, Setting] = {}
    directories: dict[str, str | None] = {}
    setting = None
    for entry in (with_requests(entry, path.parent) for entry in file.nodes):
        try:
            workload = workload_beside(entry.workload, path.parent)
            source = profiles.get(entry.name)
            table = read_cost_table(source) if source and Path(source).is_file() else None
            where = (entry.model, cluster, workload, None if table else source)
            setting = find_setting(*where, one_engine=True, name=entry.name, **options)
            if entry.outputs is not None:
                learned = document.read(LengthDistribution, path.parent / entry.outputs)
                setting = replace(setting, workload=setting.workload.with_outputs(learned))
            _check_cluster(setting.cluster)
            linked = file.linked or setting.cluster.devices_per_node
            costs, assumption = _imported(entry, setting, table, linked) if table else _costs(entry, setting, linked)
        except InputError as error:
            raise InputError(f"Node '{entry.name}' of '{path}': {error}") from None
        nodes.append(_node(entry, setting))
        models.append(costs)
        settings[entry.name] = setting
        directories[entry.name] = str(Path(entry.model).resolve()) if Path(entry.model).is_dir() else None
        assumptions += [f"{entry.name}: {text}" for text in (*setting.assumptions, *assumption)]
    if setting is None:
        raise InputError(f"'{path}' has no nodes: write at least one.")
    graph = graph_of(path, nodes, file.edges)
    table = CostTable(CostTable.VERSION, "profiles", setting.cluster.name, tuple(models))
    linked = file.linked or setting.cluster.devices_per_node
    return ApplicationPlanRequest(graph, table, setting.cluster, linked, tuple(assumptions), settings, directories)


def with_requests(entry: ApplicationNode, directory: Path) -> ApplicationNode:
    """Return the node with the numbers of requests and rounds of its prompts' file.

    The lengths of the requests are those of the workload.
    """
    if entry.prompts is None:
        return entry
    rounds = tuple(len(line.parts) for line in read_call_lines(directory / entry.prompts))
    return replace(entry, prompts=None, requests=len(rounds), rounds=rounds if max(rounds) > 1 else None)


def _without_edges(file: ModelsFile, path: Path) -> ApplicationFile:
    if file.applications is not None:
        raise InputError(f"'{path}' plans for the application in '{file.applications}': pass that file instead.")
    for entry in file.models:
        if entry.requests is None or entry.latency_bound is not None:
            raise InputError(
                f"Model '{entry.name}' has a rate or a bound, but plans of stages support only numbers of requests: "
                "write requests instead, or choose another --method."
            )
    return ApplicationFile(tuple(ApplicationNode(e.name, e.model, e.workload or "", e.requests) for e in file.models))


def _check_cluster(cluster: ClusterSpec) -> None:
    if cluster.nodes > 1:
        raise InputError(
            f"{cluster.name} has {cluster.nodes} nodes, but plans of stages support one node: use a cluster with "
            "one node."
        )


def _node(entry: ApplicationNode, setting: Setting) -> GraphNode:
    """Return a node with prompts from the workload's inputs, one per round; without requests, with their mean."""
    inputs = setting.workload.input
    node = GraphNode(entry.name, entry.name, (1,), longest_output=entry.longest_output, times=entry.times)
    if entry.requests is None:
        return replace(node, prompts=(), prompt=round(inputs.mean))
    prompts = tuple(int(length) for length in inputs.sample(entry.requests, np.random.default_rng(0)))
    rounds = (entry.rounds,) * entry.requests if isinstance(entry.rounds, int) else entry.rounds or ()
    return replace(node, prompts=prompts, rounds=rounds)


def loading_s(setting: Setting, share: float = 1.0) -> float:
    """Return the seconds in which a device loads a share of a model's weights; on CPUs with the engine's start."""
    start_s = CPU_START_S if setting.cluster.is_cpu else 0.0
    return start_s + share * setting.model.checkpoint_bytes(setting.profile.dtype) / LOAD_BYTES_S


def loading_text(cpu: bool) -> str:
    """Return a text with the assumed loading times."""
    start = f"{CPU_START_S:g} s to start an engine, " if cpu else ""
    return f"{start}a {'device' if cpu else 'GPU'}'s weights at {LOAD_BYTES_S / 1e9:g} GB/s"


def _costs(entry: ApplicationNode, setting: Setting, linked: int) -> tuple[ModelCosts, list[str]]:
    """Return the model's cost lines from its profile, under the node's name, and the assumptions about its loading."""
    from xmulti.stages.profiled_costs import profiled_model

    if setting.model.encoder_layers:
        raise InputError(
            f"{setting.model.name} is an encoder-decoder, but plans of stages support only decoder-only models: use "
            "another model."
        )
    degrees = [degree.tp for degree in setting.profile.degrees if linked % degree.tp == 0]
    typed_s = {tp: entry.typed_load_s(tp) for tp in degrees}
    load_s = {tp: typed or loading_s(setting, 1 / tp) for tp, typed in typed_s.items()}
    how = f"loading: {loading_text(setting.cluster.is_cpu)}, which takes {loading_s(setting):.0f} s on one"
    assumptions = [] if all(typed_s.values()) else [how]
    costs = profiled_model(
        entry.name,
        setting.model,
        setting.cluster,
        setting.profile,
        load_s,
        setting.workload.output,
    )
    return replace(costs, name=entry.name), assumptions


def _imported(entry: ApplicationNode, setting: Setting, table: CostTable, linked: int) -> tuple[ModelCosts, list[str]]:
    """Return the node's costs from an imported table, with its own loading times and outputs, and what is assumed.

    Raises:
        InputError: The table doesn't have the node's model, or not at a degree that divides the linked GPUs.
    """
    names = {model.name for model in table.models}
    costs = table.model(entry.name if entry.name in names else entry.model)
    fitting = [degree for degree in costs.degrees if linked % degree.tp == 0]
    if not fitting:
        has = ", ".join(str(degree.tp) for degree in costs.degrees)
        raise InputError(f"the cost table has TP {has} of '{costs.name}', and none divides {linked} linked GPUs.")
    degrees = tuple(replace(degree, load_s=entry.typed_load_s(degree.tp) or degree.load_s) for degree in fitting)
    outputs = costs.outputs if entry.outputs is None and costs.outputs else setting.workload.output
    how = f"costs of '{costs.name}': a table of {table.source}, measured on {table.machine}"
    return replace(costs, name=entry.name, degrees=degrees, outputs=outputs), [how]
