"""An application with all its lengths: the calls of each node of a call graph, and their dependencies."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from xcore.arrays import Integers
from xcore.errors import InputError
from xcore.specs.cost_table import CostTable, ModelCosts
from xcore.specs.workload import LengthDistribution
from xmulti.files.call_graph import CallGraph, GraphNode
from xmulti.stages.line_costs import line_costs
from xmulti.stages.model_run import ModelReplica, ModelWork, RemainingCalls
from xmulti.stages.output_lengths import capped, lengths_at, quantiles


@dataclass(frozen=True, eq=False)
class NodeCalls:
    """One node's calls; a call of several rounds counts as several, one following the other."""

    model: str
    calls: RemainingCalls
    needs: tuple[tuple[str, Integers], ...] = ()
    """Nodes on which the calls depend: for each call the index of the call that must have ended before, or -1."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The nodes that this one reads."""
        return tuple(name for name, _ in self.needs)


@dataclass(frozen=True, eq=False)
class Application:
    """The nodes, each after its sources, and the replicas of their models by tensor-parallel degree."""

    nodes: Mapping[str, NodeCalls]
    replicas: Mapping[str, Mapping[int, ModelReplica]]
    load_s: Mapping[tuple[str, int], float]
    """By model and degree; degrees without measured loading are in neither mapping."""

    def replica(self, name: str, tp: int) -> ModelReplica:
        """Return a node's model at a degree."""
        return self.replicas[self.nodes[name].model][tp]

    def work(self, name: str) -> ModelWork:
        """Return the work of a node's model per token."""
        return next(iter(self.replicas[self.nodes[name].model].values())).work


@dataclass(frozen=True, eq=False)
class _Drawn:
    """A node's calls with the outputs that other nodes read."""

    calls: NodeCalls
    outputs: Integers
    last: Integers
    """For each call the index of its last round; for a node without rounds, the index itself."""
    firsts: Integers

    def all_rounds(self) -> Integers:
        """Return the tokens that each call generates in all its rounds together."""
        before = np.concatenate([[0], np.cumsum(self.outputs)])
        rounds: Integers = before[self.last + 1] - before[self.firsts]
        return rounds


def draw(
    graph: CallGraph,
    table: CostTable,
    seed: int = 0,
    shared_quantiles: bool = False,
    outputs: Mapping[str, LengthDistribution] | None = None,
    padded: bool = True,
) -> Application:
    """Return the application with output lengths drawn from each model's distribution in `outputs`, else in the table.

    The same seed draws the same lengths. Each node has its own random stream unless `shared_quantiles`.

    Raises:
        InputError: The table lacks a model, or its outputs.
    """
    drawn: dict[str, _Drawn] = {}
    for node in graph.in_order():
        model = table.model(node.model)
        known = (outputs or {}).get(node.model, model.outputs)
        if known is None:
            raise InputError(f"The cost table has no output lengths of model '{node.model}'.")
        drawn[node.name] = _draw_node(graph, node, model, known, drawn, (seed, shared_quantiles))
    models = [table.model(name) for name in dict.fromkeys(node.model for node in graph.nodes)]
    replicas = {model.name: model_replicas(model, padded) for model in models}
    load_s = {(m.name, d.tp): d.load_s for m in models for d in m.degrees if d.load_s is not None}
    return Application({name: of_one.calls for name, of_one in drawn.items()}, replicas, load_s)


def model_replicas(model: ModelCosts, padded: bool) -> dict[int, ModelReplica]:
    """Return a model's replicas. Work is counted at the smallest degree, so that it is the same at all degrees."""
    degrees = sorted((d for d in model.degrees if d.load_s is not None), key=lambda d: d.tp)
    if not degrees:
        raise InputError(f"The cost table has no loading seconds of model '{model.name}'.")
    least = degrees[0]
    work = ModelWork(least.macs_per_token * least.tp, least.macs_per_position * least.tp)
    return {d.tp: ModelReplica(line_costs(d, padded), work, model.context) for d in degrees}


def _draw_node(
    graph: CallGraph,
    node: GraphNode,
    model: ModelCosts,
    known: LengthDistribution,
    drawn: Mapping[str, _Drawn],
    stream: tuple[int, bool],
) -> _Drawn:
    prompts, needs = _incoming(graph, node, drawn)
    prompts = np.repeat(prompts, node.times)
    needs = tuple((name, np.repeat(places, node.times)) for name, places in needs)
    rounds = np.repeat(np.array(node.rounds or (1,) * (len(prompts) // node.times), dtype=np.int64), node.times)
    count, last = int(rounds.sum()), np.cumsum(rounds) - 1
    firsts = last - rounds + 1
    each = np.repeat(prompts, rounds)
    wanted = lengths_at(known, quantiles(count, stream[0], node.name, stream[1]))
    following = np.arange(1, count + 1)
    following[last] = -1
    carried = np.zeros(count, dtype=np.int64)
    outputs = np.zeros(count, dtype=np.int64)
    places = firsts
    left = rounds.copy()
    while len(places):  # round by round: a prompt reads the output of the round before
        outputs[places] = capped(wanted[places], (each + carried)[places], model.context, node.longest_output)
        left = left - 1
        more = places[left > 0]
        carried[more + 1] = outputs[more]
        places, left = more + 1, left[left > 0]
    calls = RemainingCalls(each + carried, outputs, np.zeros(count), following)
    at_first = []
    for name, of_calls in needs:
        waits = np.full(count, -1)
        waits[firsts] = of_calls
        at_first.append((name, waits))
    return _Drawn(NodeCalls(node.model, calls, tuple(at_first)), outputs, last, firsts)


def _incoming(
    graph: CallGraph, node: GraphNode, drawn: Mapping[str, _Drawn]
) -> tuple[Integers, tuple[tuple[str, Integers], ...]]:
    """Return each call's prompt in its first round, and the other nodes' calls on which it depends."""
    edges = graph.into(node.name)
    if edges and edges[0].kind == "separate":
        sources = [drawn[edge.source] for edge in edges]
        counts = [len(source.outputs) for source in sources]
        before = np.cumsum([0, *counts])
        needs = []
        for edge, start, count in zip(edges, before, counts, strict=False):
            places = np.full(int(before[-1]), -1)
            places[start : start + count] = np.arange(count)
            needs.append((edge.source, places))
        return np.concatenate([source.outputs for source in sources]) + node.prompt, tuple(needs)
    prompts = np.array(node.prompts, dtype=np.int64) + node.prompt if node.prompts else None
    needs = []
    for edge in edges:
        source = drawn[edge.source]
        read = source.outputs[source.last] if edge.kind == "final" else source.all_rounds()
        if prompts is None:
            prompts = np.full(len(read), node.prompt, dtype=np.int64)
        if len(prompts) != len(read):
            raise InputError(
                f"Node '{node.name}' has {len(prompts):,} calls, but reads {len(read):,} outputs of "
                f"'{edge.source}': both numbers must be equal."
            )
        prompts = prompts + read
        needs.append((edge.source, source.last))
    assert prompts is not None, "the graph checks that a node has calls"
    return prompts, tuple(needs)
