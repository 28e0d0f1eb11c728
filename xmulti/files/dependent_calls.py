"""The calls of an application while it runs: which can begin, and with which prompt.

A call of several rounds is a *chain*: each round reads the output of the round before. Prompts and outputs can be any
type with addition. So the same rules serve runs (tuples of token ids) and simulations (numbers of tokens).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from xcore.errors import InputError
from xmulti.files.call_graph import CallGraph, GraphEdge, GraphNode

Tokens = TypeVar("Tokens", int, tuple[int, ...])


@dataclass(eq=False)
class Chain(Generic[Tokens]):
    """One call of a node, in all its rounds."""

    node: GraphNode
    index: int
    """Its index among the node's calls."""
    own: Sequence[Tokens]
    """The beginning of each round's prompt: its own tokens, with the node's instructions."""
    reads: list[tuple["Chain[Tokens]", int | None]] = field(default_factory=list)
    """Other nodes' calls whose outputs its prompts contain, with the round; None: all rounds."""
    readers: list["Chain[Tokens]"] = field(default_factory=list)
    outputs: list[Tokens] = field(default_factory=list)
    """Outputs of the rounds that have ended."""
    begun: bool = False

    @property
    def name(self) -> str:
        """The name of the chain's next call."""
        return self.call(len(self.outputs))

    def call(self, number: int) -> str:
        """Return the name of the call of a round: node/index/round."""
        return f"{self.node.name}/{self.index}/{number}"

    @property
    def ended(self) -> bool:
        """Whether all rounds of the chain have ended."""
        return len(self.outputs) == len(self.own)

    @property
    def ready(self) -> bool:
        """Whether all outputs that the chain reads are available."""
        return all(len(of.outputs) > (len(of.own) - 1 if at is None else at) for of, at in self.reads)


class DependentCalls(Generic[Tokens]):
    """All calls of a graph: `begin` returns calls without dependencies, `end` calls whose dependencies have ended.

    `own` has the tokens of each node with own calls, by call and round. `instructions` has the tokens that all prompts
    of a node contain. `read` converts a source's output into the part of a reader's prompt. `in_turn`: a node's calls
    begin only after all calls of earlier nodes have ended, for comparison.

    Raises:
        InputError: Joined nodes have different numbers of calls.
    """

    def __init__(
        self,
        graph: CallGraph,
        own: Mapping[str, Sequence[Sequence[Tokens]]],
        instructions: Mapping[str, Tokens],
        read: Callable[[GraphNode, GraphNode, Tokens], Tokens] = lambda source, reader, output: output,
        in_turn: bool = False,
    ):
        self._convert: Callable[[GraphNode, GraphNode, Tokens], Tokens] = read
        self._in_turn = in_turn
        self._of_node: dict[str, list[Chain[Tokens]]] = {}
        for node in graph.in_order():
            known = own.get(node.name)
            self._of_node[node.name] = self._chains(node, graph.into(node.name), known, instructions[node.name])
        self.left_of = {name: sum(len(chain.own) for chain in chains) for name, chains in self._of_node.items()}
        """By node: number of calls that haven't ended; each round is a call."""
        self.left = sum(self.left_of.values())
        """Number of all nodes' calls that haven't ended."""

    @property
    def chains(self) -> Mapping[str, Sequence[Chain[Tokens]]]:
        """All calls of each node; each node comes after those that it reads."""
        return self._of_node

    def _chains(
        self,
        node: GraphNode,
        edges: tuple[GraphEdge, ...],
        own: Sequence[Sequence[Tokens]] | None,
        instructions: Tokens,
    ) -> list[Chain[Tokens]]:
        read = self._read(node, edges)
        counts = {len(reads) for reads in read} | ({len(own)} if own else set())
        if len(counts) > 1:
            raise InputError(
                f"Node '{node.name}' joins {' and '.join(map(str, sorted(counts)))} calls: each source must have as "
                "many calls as the node has prompts."
            )
        chains: list[Chain[Tokens]] = []
        for i in range(counts.pop()):
            rounds = [tokens + instructions for tokens in own[i]] if own else [instructions]
            for _ in range(node.times):
                chain = Chain(node, len(chains), rounds, [pair for reads in read for pair in reads[i]])
                for source, _ in chain.reads:
                    source.readers.append(chain)
                chains.append(chain)
        return chains

    def _read(
        self, node: GraphNode, edges: tuple[GraphEdge, ...]
    ) -> list[list[list[tuple[Chain[Tokens], int | None]]]]:
        """Return what the node's calls read, by edge, then by call.

        Each separate output is a call; calls are in the order of the edges.
        """
        if edges and edges[0].kind == "separate":
            chains = [chain for edge in edges for chain in self._of_node[edge.source]]
            return [[[(chain, at)] for chain in chains for at in range(len(chain.own))]]
        return [
            [[(chain, len(chain.own) - 1 if edge.kind == "final" else None)] for chain in self._of_node[edge.source]]
            for edge in edges
        ]

    def prompt(self, chain: Chain[Tokens]) -> Tokens:
        """Return the prompt of a chain's next call.

        It has the chain's own tokens, the outputs that it reads, and the output of the round before.
        """
        prompt = chain.own[len(chain.outputs)]
        for source, at in chain.reads:
            for output in source.outputs if at is None else source.outputs[at : at + 1]:
                prompt = prompt + self._convert(source.node, chain.node, output)
        return prompt + chain.outputs[-1] if chain.outputs else prompt

    def begin(self) -> list[Chain[Tokens]]:
        """Return the calls that have no unfinished dependency, and mark them as begun."""
        return self._begun([chain for chains in self._of_node.values() for chain in chains])

    def end(self, chain: Chain[Tokens], output: Tokens) -> list[Chain[Tokens]]:
        """Record that a chain's call has ended, and return the chains whose next call can begin."""
        chain.outputs.append(output)
        self.left -= 1
        self.left_of[chain.node.name] -= 1
        if not chain.ended:
            following: list[Chain[Tokens]] = [chain]
            return following + self._begun(chain.readers)
        return self.begin() if self._in_turn else self._begun(chain.readers)

    def _begun(self, chains: Sequence[Chain[Tokens]]) -> list[Chain[Tokens]]:
        begun = [chain for chain in chains if chain.ready and not chain.begun and self._may_begin(chain.node)]
        for chain in begun:
            chain.begun = True
        return begun

    def _may_begin(self, node: GraphNode) -> bool:
        if not self._in_turn:
            return True
        first = next((name for name, chains in self._of_node.items() if not all(c.ended for c in chains)), None)
        return node.name == first
