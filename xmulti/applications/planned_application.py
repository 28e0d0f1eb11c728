"""An application on a plan's models: its calls' prompts, and the requests made from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from xcore.errors import InputError
from xcore.requests.request import Request
from xcore.specs.cluster_plan import Plan, PlannedModel
from xcore.specs.workload import Workload
from xcore.tokenizer import TOKENIZER, encode, load_tokenizer
from xcore.traces.trace import parse_workload
from xmulti.applications.synthetic_lengths import (
    graph_node,
    instruction_tokens,
    most_output,
    node_stream,
    output_length,
    own_lengths,
)
from xmulti.files.application_file import ApplicationNode, graph_of, model_for, read_application_file, read_call_lines
from xmulti.files.call_graph import CallGraph, GraphNode
from xmulti.files.dependent_calls import Chain, DependentCalls, Tokens
from xmulti.files.models_file import workload_beside

if TYPE_CHECKING:
    from tokenizers import Tokenizer


Ids = tuple[int, ...]


@dataclass(frozen=True)
class PlannedApplication:
    """An application whose nodes use models of a plan."""

    graph: CallGraph
    models: Mapping[str, PlannedModel]
    """By node: its model."""
    own: Mapping[str, Sequence[Sequence[Ids]]]
    """Tokens of a node's calls by call and round."""
    instructions: Mapping[str, Ids]
    drawn: Mapping[str, Workload]
    """By node with made-up texts: the workload that gives its outputs' lengths."""
    seed: int

    def calls(self, in_turn: bool = False) -> DependentCalls[Ids]:
        """Return the application's calls, before any has begun.

        Outputs go from model to model as token ids, or as texts if their tokenizers differ. `in_turn` as in
        `DependentCalls`.
        """
        files = {name: _tokenizer_bytes(model) for name, model in self.models.items()}
        differ = {(edge.source, edge.target) for edge in self.graph.edges if files[edge.source] != files[edge.target]}
        tokenizers = {name: _tokenizer(self.models[name]) for pair in differ for name in pair}

        def read(source: GraphNode, reader: GraphNode, output: Ids) -> Ids:
            if (source.name, reader.name) not in differ:
                return output
            text = tokenizers[source.name].decode(list(output))
            return tuple(encode(tokenizers[reader.name], text, special=False))

        return DependentCalls(self.graph, self.own, self.instructions, read, in_turn)

    def lengths(self, in_turn: bool = False) -> DependentCalls[int]:
        """Return the same calls in numbers of tokens."""
        own = {name: [[len(ids) for ids in rounds] for rounds in calls] for name, calls in self.own.items()}
        instructions = {name: len(ids) for name, ids in self.instructions.items()}
        return DependentCalls(self.graph, own, instructions, in_turn=in_turn)

    def request(self, chain: Chain[Ids], prompt: Ids) -> Request:
        """Return the request of a chain's next call.

        Raises:
            InputError: The prompt leaves no room.
        """
        made_up = chain.node.name in self.drawn
        return Request(chain.name, prompt, self.output_tokens(chain, len(prompt)), ignore_eos=made_up)

    def output_tokens(self, chain: Chain[Tokens], prompt_tokens: int) -> int:
        """Return the most output tokens of a chain's next call; for synthetic texts, the exact number.

        Raises:
            InputError: The prompt leaves no room.
        """
        node, spec = chain.node, self.models[chain.node.name].schedule.model.spec
        most = most_output(chain, prompt_tokens, spec.name, spec.context)
        if node.name not in self.drawn:
            return most
        return min(most, output_length(chain, self.drawn[node.name], self.seed))


def _tokenizer_bytes(model: PlannedModel) -> bytes | None:
    path = Path(str(model.directory)) / TOKENIZER
    return path.read_bytes() if path.is_file() else None


def _tokenizer(model: PlannedModel) -> "Tokenizer":
    tokenizer = load_tokenizer(Path(str(model.directory)))
    if tokenizer is None:
        raise InputError(
            f"Model '{model.name}' has no {TOKENIZER}, but it exchanges text with a model that has another "
            f"tokenizer: add the file to '{model.directory}'."
        )
    return tokenizer


def plan_application(path: Path, plan: Plan, seed: int) -> PlannedApplication:
    """Return an application file's calls on the models of a plan, as `application_on` has them."""
    return application_on(path, {model.name: model for model in plan.models}, seed)


def application_on(path: Path, by_name: Mapping[str, PlannedModel], seed: int) -> PlannedApplication:
    """Return an application file's calls on planned models; a node has the model's name, or names it.

    Prompts without a file are synthetic: random token ids.

    Raises:
        InputError: The file can't be read or run.
    """
    file = read_application_file(path)
    nodes: list[GraphNode] = []
    models: dict[str, PlannedModel] = {}
    own: dict[str, list[list[Ids]]] = {}
    instructions: dict[str, Ids] = {}
    drawn: dict[str, Workload] = {}
    for place, entry in enumerate(file.nodes):
        model = model_for(entry, by_name, f"Node '{entry.name}' of '{path}' names no model of the plan")
        texts = _Texts(entry, model, path.parent, node_stream(seed, place))
        try:
            own[entry.name], instructions[entry.name] = texts.own(), texts.instructions()
        except InputError as error:
            raise InputError(f"Node '{entry.name}' of '{path}': {error}") from None
        lengths = [list(map(len, rounds)) for rounds in own[entry.name]]
        nodes.append(graph_node(entry, model.name, lengths, len(instructions[entry.name])))
        models[entry.name] = model
        drawn |= {entry.name: texts.workload} if texts.made_up else {}
    return PlannedApplication(graph_of(path, nodes, file.edges), models, own, instructions, drawn, seed)


@dataclass(frozen=True)
class _Texts:
    """A node's own texts: the parts of its prompts that are not other nodes' outputs."""

    entry: ApplicationNode
    model: PlannedModel
    directory: Path
    rng: np.random.Generator

    @property
    def made_up(self) -> bool:
        """Whether all texts are synthetic."""
        return self.entry.prompts is None and self.entry.instructions is None

    @property
    def workload(self) -> Workload:
        """The lengths of synthetic texts."""
        return parse_workload(workload_beside(self.entry.workload, self.directory))

    def own(self) -> list[list[Ids]]:
        """Return the tokens of each call's rounds; none for a node without own calls."""
        entry = self.entry
        if entry.prompts is not None:
            lines = read_call_lines(self.directory / entry.prompts)
            return [[self._ids(part, True) for part in line.parts] for line in lines]
        lengths = own_lengths(entry, self.workload, self.rng)
        return [[self._random(length) for length in rounds] for rounds in lengths]

    def instructions(self) -> Ids:
        """Return the instructions that all prompts have: the node's text.

        For a node whose calls come from other nodes, synthetic instructions have the inputs' mean length.
        """
        alone = self.entry.requests is None and self.entry.prompts is None
        if self.entry.instructions is not None:
            return self._ids(self.entry.instructions, alone)
        return self._random(instruction_tokens(self.entry, self.workload)) if alone else ()

    def _random(self, count: int) -> Ids:
        return tuple(self.rng.integers(0, self.model.schedule.model.spec.vocab, size=count).tolist())

    def _ids(self, part: str | Ids, begins: bool) -> Ids:
        """Return the token ids of a text; `begins`: with the tokens that the tokenizer puts before a prompt."""
        if not isinstance(part, str):
            return part
        tokenizer = load_tokenizer(Path(str(self.model.directory)))
        if tokenizer is None:
            raise InputError(f"model '{self.model.name}' has no {TOKENIZER}: write token ids, or add this file.")
        return tuple(encode(tokenizer, part, begins))
