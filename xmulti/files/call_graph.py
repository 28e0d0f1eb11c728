"""CallGraph: an application of several models, whose calls read other models' outputs."""

from dataclasses import dataclass
from typing import Literal

from xcore.errors import InputError
from xcore.spec import Spec

EdgeKind = Literal["concatenate", "separate", "final"]


@dataclass(frozen=True)
class GraphEdge(Spec):
    """Outputs of one node that go into another node's prompts; from a node to itself, into the next round's prompt.

    `concatenate`: call j of the target reads all outputs of call j of the source, in addition to its own prompt and
    those of other sources. `final`: the same with the last round's output only. `separate`: each output becomes a
    separate call.
    """

    source: str
    target: str
    kind: EdgeKind = "concatenate"


@dataclass(frozen=True)
class GraphNode(Spec):
    """One model in an application, with its initial calls."""

    name: str
    model: str
    prompts: tuple[int, ...] = ()
    """Own tokens of each call, in each of its rounds; empty if the calls come only from other nodes."""
    prompt: int = 0
    """Tokens of instructions that each call has in addition."""
    rounds: tuple[int, ...] = ()
    """Rounds of each call, if the node has an edge to itself; empty: one each."""
    longest_output: int | None = None
    times: int = 1
    """How often each call is made."""

    def __post_init__(self) -> None:
        if self.prompt < 0 or any(tokens < 0 for tokens in self.prompts):
            raise InputError(f"Node '{self.name}' has a prompt with a negative number of tokens.")
        if self.rounds and (len(self.rounds) != len(self.prompts) or min(self.rounds) < 1):
            raise InputError(
                f"Node '{self.name}' has {len(self.rounds)} numbers of rounds for {len(self.prompts)} prompts, the "
                f"smallest is {min(self.rounds)}: each prompt needs one number of at least 1."
            )
        for key, value in (("times", self.times), ("longest_output", self.longest_output)):
            if value is not None and value < 1:
                raise InputError(f"Node '{self.name}' has {key} of {value}: it must be at least 1.")


@dataclass(frozen=True)
class CallGraph(Spec):
    """Nodes and edges; without edges from a node to itself it has no cycles."""

    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...] = ()

    def __post_init__(self) -> None:
        names = [node.name for node in self.nodes]
        if not names or len(set(names)) < len(names):
            got = ", ".join(map(repr, names)) or "none"
            raise InputError(f"An application needs nodes with unique names (got {got}).")
        unknown = sorted({name for edge in self.edges for name in (edge.source, edge.target)} - set(names))
        if unknown:
            raise InputError(
                f"Edges name {', '.join(unknown)}, but the nodes are {', '.join(names)}: correct the edges."
            )
        pairs = [(edge.source, edge.target) for edge in self.edges]
        twice = next((pair for pair in pairs if pairs.count(pair) > 1), None)
        if twice:
            raise InputError(f"There are two edges from '{twice[0]}' to '{twice[1]}': leave one of them out.")
        for node in self.nodes:
            self._check_node(node)
        self.in_order()

    def _check_node(self, node: GraphNode) -> None:
        into, loops = self.into(node.name), self.loops(node.name)
        kinds = {edge.kind for edge in into}
        if not node.prompts and not into:
            raise InputError(f"Node '{node.name}' has no calls: add prompts, or an edge into the node.")
        if "separate" in kinds and (len(kinds) > 1 or node.prompts):
            raise InputError(
                f"Node '{node.name}' takes outputs as separate calls: leave out its prompts and its edges of other "
                "kinds."
            )
        if node.rounds and not loops:
            raise InputError(f"Node '{node.name}' has rounds, so it needs an edge to itself.")

    def into(self, name: str) -> tuple[GraphEdge, ...]:
        """Return the edges from other nodes into one."""
        return tuple(edge for edge in self.edges if edge.target == name != edge.source)

    def loops(self, name: str) -> bool:
        """Return whether a node has an edge to itself."""
        return any(edge.source == edge.target == name for edge in self.edges)

    def in_order(self) -> tuple[GraphNode, ...]:
        """Return the nodes, each after the nodes whose outputs it reads.

        Raises:
            InputError: The edges form a cycle.
        """
        ordered: list[GraphNode] = []
        left = list(self.nodes)
        while left:
            known = {node.name for node in ordered}
            ready = [node for node in left if all(edge.source in known for edge in self.into(node.name))]
            if not ready:
                circle = ", ".join(self._read_by_others({node.name for node in left}))
                raise InputError(
                    f"The edges between {circle} form a cycle: remove one of them; a node that reads its own output "
                    "needs rounds and an edge to itself."
                )
            ordered += ready
            left = [node for node in left if node not in ready]
        return tuple(ordered)

    def _read_by_others(self, names: set[str]) -> list[str]:
        """Return the nodes of the cycle: those that remain when nodes that no other reads are removed repeatedly."""
        while True:
            read = {edge.source for name in names for edge in self.into(name)} & names
            if read == names:
                return sorted(names)
            names = read

    def joined(self, other: "CallGraph") -> "CallGraph":
        """Return both applications as one; their nodes must have different names."""
        return CallGraph(self.nodes + other.nodes, self.edges + other.edges)
