"""Calls whose lengths are known, against the application that drew those lengths."""

from dataclasses import replace

import numpy as np
import pytest

from tests.xmulti.stages import applications
from xmulti.files.call_graph import CallGraph, GraphEdge, GraphNode
from xmulti.files.dependent_calls import DependentCalls
from xmulti.stages.application import draw
from xmulti.stages.stage_prediction import of_known_calls

SEPARATE = CallGraph(
    (
        GraphNode("a", "small", (5, 6), rounds=(2, 1), longest_output=9),
        GraphNode("b", "small", (7,), times=3),
        GraphNode("c", "small", prompt=4, times=2),
        GraphNode("d", "small", (1, 2)),
    ),
    (GraphEdge("a", "a"), GraphEdge("a", "c", "separate"), GraphEdge("b", "c", "separate"), GraphEdge("a", "d")),
)
GRAPHS = {
    "ensemble": applications.ensemble(3, 12),
    "chain": applications.chain_and_judge(9),
    "separate": (SEPARATE, applications.table()),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_what_was_drawn_is_found_again(name):
    """From what each call was asked and answered, one call after the other, comes the application that was drawn."""
    graph, table = GRAPHS[name]
    drawn = draw(graph, table, seed=3, padded=False)
    rounds = {node.name: node.rounds or (1,) * len(node.prompts) for node in graph.nodes}
    own = {
        node.name: [[tokens] * count for tokens, count in zip(node.prompts, rounds[node.name], strict=True)]
        for node in graph.nodes
    }
    calls = DependentCalls(graph, own, {node.name: node.prompt for node in graph.nodes})
    outputs = {}
    for node, chains in calls.chains.items():
        names = [chain.call(number) for chain in chains for number in range(len(chain.own))]
        outputs |= dict(zip(names, drawn.nodes[node].calls.outputs.tolist(), strict=True))
    lengths, waiting = {}, calls.begin()
    while waiting:
        chain = waiting.pop()
        lengths[chain.name] = calls.prompt(chain), outputs[chain.name]
        waiting += calls.end(chain, outputs[chain.name])
    assert calls.left == 0 and not any(calls.left_of.values())
    own_table = replace(table, models=tuple(replace(table.model(n.model), name=n.name) for n in graph.nodes))
    known = of_known_calls(calls, lengths, own_table)
    assert list(known.nodes) == list(drawn.nodes)
    for node, expected in drawn.nodes.items():
        found = known.nodes[node]
        for part in ("prompts", "outputs", "computed", "following"):
            assert np.array_equal(getattr(found.calls, part), getattr(expected.calls, part)), (node, part)
        waits = [{name: places.tolist() for name, places in of_one.needs} for of_one in (found, expected)]
        assert waits[0] == waits[1]
        assert known.replicas[node].keys() == drawn.replicas[expected.model].keys()
