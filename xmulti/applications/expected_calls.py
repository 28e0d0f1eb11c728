"""The calls that an application is expected to make of a models file's models: those of a run with made-up texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from xcore.errors import InputError
from xcore.specs.cluster_plan import Plan
from xcore.specs.model import ModelSpec
from xcore.specs.profile import Profile
from xcore.specs.workload import RequestLengths, Workload
from xcore.traces.trace import parse_workload
from xmulti.applications.synthetic_lengths import (
    graph_node,
    instruction_tokens,
    most_output,
    node_stream,
    output_length,
    own_lengths,
)
from xmulti.files.application_file import graph_of, model_for, read_application_file, with_requests
from xmulti.files.call_graph import CallGraph, GraphNode
from xmulti.files.dependent_calls import Chain, DependentCalls, Tokens
from xmulti.files.models_file import ModelEntry, ModelsFile, workload_beside
from xmulti.sharing.call_replay import CallReplay, replay_calls
from xscheduler.settings import find_model

SEED = 0
"""Seed of the lengths for which plans are made; `exegpt run` has the same default."""


@dataclass(frozen=True)
class ExpectedCalls:
    """An application whose nodes use models of a models file, in numbers of tokens."""

    graph: CallGraph
    models: Mapping[str, str]
    """By node: the model's name."""
    specs: Mapping[str, ModelSpec]
    """By node: the model's spec."""
    own: Mapping[str, Sequence[Sequence[int]]]
    """Tokens of a node's calls by call and round."""
    workloads: Mapping[str, Workload]
    """By node: the distribution of its outputs' lengths."""

    def calls(self) -> DependentCalls[int]:
        """Return the application's calls, before any has begun."""
        return DependentCalls(self.graph, self.own, {node.name: node.prompt for node in self.graph.nodes})

    def output_of(self, chain: Chain[Tokens], prompt: int) -> int:
        """Return the output tokens of a chain's next call.

        Raises:
            InputError: The prompt leaves no room.
        """
        name = chain.node.name
        spec = self.specs[name]
        return min(
            most_output(chain, prompt, spec.name, spec.context), output_length(chain, self.workloads[name], SEED)
        )

    def lengths(self) -> dict[str, list[RequestLengths]]:
        """Return the calls of each model.

        Raises:
            InputError: A call's prompt leaves no room.
        """
        calls = self.calls()
        found: dict[str, list[RequestLengths]] = {}
        waiting = calls.begin()[::-1]
        while waiting:
            chain = waiting.pop()
            prompt = calls.prompt(chain)
            output = self.output_of(chain, prompt)
            found.setdefault(self.models[chain.node.name], []).append(RequestLengths(prompt, output))
            waiting += calls.end(chain, output)[::-1]
        return found

    def replayed(self, plan: Plan, profiles: Mapping[str, Profile]) -> CallReplay:
        """Return the replay of the calls on a plan of all models, without other requests."""
        return replay_calls(plan, lambda model: profiles[model.name], self.calls(), self.models, self.output_of)


def expected_calls(path: Path, file: ModelsFile) -> ExpectedCalls | None:
    """Return the expected calls of the application that a models file names; None if it names none.

    Raises:
        InputError: The application can't be read, has nodes on other models, or has a cycle.
    """
    if file.applications is None:
        return None
    where = path.parent / file.applications
    by_name = {entry.name: entry for entry in file.models}
    nodes: list[GraphNode] = []
    models: dict[str, ModelEntry] = {}
    own: dict[str, list[list[int]]] = {}
    workloads: dict[str, Workload] = {}
    typed = read_application_file(where)
    for place, entry in enumerate(with_requests(entry, where.parent) for entry in typed.nodes):
        models[entry.name] = model_for(entry, by_name, f"Node '{entry.name}' of '{where}' names no model of '{path}'")
        workload = parse_workload(workload_beside(entry.workload, where.parent))
        try:
            own[entry.name] = own_lengths(entry, workload, node_stream(SEED, place))
        except InputError as error:
            raise InputError(f"Node '{entry.name}' of '{where}': {error}") from None
        workloads[entry.name] = workload
        nodes.append(graph_node(entry, models[entry.name].name, own[entry.name], instruction_tokens(entry, workload)))
    graph = graph_of(where, nodes, typed.edges)
    specs = {name: find_model(entry.model) for name, entry in models.items()}
    return ExpectedCalls(graph, {name: entry.name for name, entry in models.items()}, specs, own, workloads)
