"""The calls of an application while it runs: which can begin, and with which prompt.

A call of several rounds is a *chain*: each round reads the output of the one before. Prompts and outputs are whatever
adds up, so that the same rules serve runs (tuples of token ids) and simulations (numbers of tokens).
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
    """Among the node's calls."""
    own: Sequence[Tokens]
    """What each round's prompt begins with: tokens of its own, with the node's instructions."""
    reads: list[tuple["Chain[Tokens]", int | None]] = field(default_factory=list)
    """Other nodes' calls of which its prompts have the output of a round; None: of all rounds."""
    readers: list["Chain[Tokens]"] = field(default_factory=list)
    outputs: list[Tokens] = field(default_factory=list)
    """Of the rounds that have ended."""
    begun: bool = False

    @property
    def name(self) -> str:
        """Of its next call."""
        return self.call(len(self.outputs))

    def call(self, number: int) -> str:
        """Return the name of the call of a round: node/index/round."""
        return f"{self.node.name}/{self.index}/{number}"

    @property
    def ended(self) -> bool:
        """Whether all its rounds have."""
        return len(self.outputs) == len(self.own)

    @property
    def ready(self) -> bool:
        """Whether all that it reads is there."""
        return all(len(of.outputs) > (len(of.own) - 1 if at is None else at) for of, at in self.reads)


class DependentCalls(Generic[Tokens]):
    """All calls of a graph: `begin` names those that wait for none, `end` those that have waited for one.

    `own` has the tokens of each node with calls of its own, by call and round; `instructions` those that all prompts of
    a node have. `read` makes of a source's output what a reader's prompt has of it. `in_turn`: no node's calls begin
    before all of those in front of it have ended, for comparison. InputError where joined nodes differ in their number
    of calls.
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
        """By node: calls that haven't ended, each round one."""
        self.left = sum(self.left_of.values())
        """Of all nodes."""

    @property
    def chains(self) -> Mapping[str, Sequence[Chain[Tokens]]]:
        """All calls of each node; nodes behind those that they read."""
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
                f"Node '{node.name}' joins {' and '.join(map(str, sorted(counts)))} calls: it needs as many of each "
                "source as prompts of its own."
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
        """Return by edge, then by call of the node: what it reads.

        Separate outputs are calls, of one edge after the other.
        """
        if edges and edges[0].kind == "separate":
            chains = [chain for edge in edges for chain in self._of_node[edge.source]]
            return [[[(chain, at)] for chain in chains for at in range(len(chain.own))]]
        return [
            [[(chain, len(chain.own) - 1 if edge.kind == "final" else None)] for chain in self._of_node[edge.source]]
            for edge in edges
        ]

    def prompt(self, chain: Chain[Tokens]) -> Tokens:
        """Return of its next call: what is its own, what it reads of others, and the output of the round before."""
        prompt = chain.own[len(chain.outputs)]
        for source, at in chain.reads:
            for output in source.outputs if at is None else source.outputs[at : at + 1]:
                prompt = prompt + self._convert(source.node, chain.node, output)
        return prompt + chain.outputs[-1] if chain.outputs else prompt

    def begin(self) -> list[Chain[Tokens]]:
        """Return the calls that wait for none."""
        return self._begun([chain for chains in self._of_node.values() for chain in chains])

    def end(self, chain: Chain[Tokens], output: Tokens) -> list[Chain[Tokens]]:
        """Return a chain's call has ended.

        Return the chains whose next call can begin.
        """
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
