"""Call graphs: what is no application, and the order of its nodes."""

import pytest

from xcore import document
from xcore.errors import InputError
from xmulti.files.call_graph import CallGraph, GraphEdge, GraphNode
from xmulti.files.stage_plan import ExecutionStage, StagedNode, StagePlan


def node(name, *prompts, **options):
    return GraphNode(name, "m", prompts, **options)


@pytest.mark.parametrize(
    ("nodes", "edges", "message"),
    [
        ((), (), "needs nodes"),
        ((node("a", 1), node("a", 1)), (), "nodes with unique names"),
        ((node("a", 1),), (("a", "b"),), "name b, but the nodes are"),
        ((node("a"),), (), "'a' has no calls"),
        (
            (node("a"), node("b")),
            (("a", "b"), ("b", "a")),
            "The edges between a, b form a cycle: remove one of them; a node that reads",
        ),
        (
            (node("c"), node("a"), node("d"), node("b")),
            (("a", "b"), ("b", "a"), ("b", "c"), ("c", "d")),
            "between a, b form a cycle",
        ),
        ((node("a", 1, rounds=(2,)),), (), "needs an edge to itself"),
        ((node("a", 1), node("b", 1)), (("a", "b", "separate"),), "separate calls"),
        ((node("a", 1), node("b")), (("a", "b"), ("a", "b", "final")), "There are two edges from 'a' to 'b'"),
    ],
)
def test_what_is_no_application(nodes, edges, message):
    with pytest.raises(InputError, match=message):
        CallGraph(nodes, tuple(GraphEdge(*edge) for edge in edges))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": (1, 2)}, "'a' has 2 numbers of rounds for 1 prompts, the smallest is 1"),
        ({"rounds": (0,)}, "'a' has 1 numbers of rounds for 1 prompts, the smallest is 0"),
        ({"times": 0}, "'a' has times of 0"),
        ({"longest_output": 0}, "'a' has longest_output of 0"),
    ],
)
def test_what_is_no_node(options, message):
    with pytest.raises(InputError, match=message):
        node("a", 5, **options)


def test_nodes_come_behind_their_sources():
    nodes = (node("last"), node("loop", 3, rounds=(2,)), node("first", 1))
    edges = (GraphEdge("loop", "last"), GraphEdge("first", "loop"), GraphEdge("loop", "loop"))
    graph = CallGraph(nodes, edges)
    assert [node.name for node in graph.in_order()] == ["first", "loop", "last"]
    assert graph.loops("loop") and not graph.loops("last")
    data = document.to_dict(graph)
    assert document.from_dict(CallGraph, data, "graph") == graph
    assert CallGraph((node("x", 1),)).joined(graph).into("loop") == graph.into("loop")


def test_a_plan_gives_each_device_once():
    staged = StagedNode("a", 1, 2, (0, 1))
    with pytest.raises(InputError, match="assigned only once"):
        ExecutionStage(0.0, 1.0, (staged, StagedNode("b", 1, 1, (1,))))
    with pytest.raises(InputError, match="2 devices for 2 x 2"):
        StagedNode("a", 2, 2, (0, 1))
    with pytest.raises(InputError, match="beyond the 1"):
        StagePlan(1, "samullm", 1, 1, (ExecutionStage(0.0, 1.0, (staged,)),), 0.0)
    plan = StagePlan(1, "samullm", 2, 2, (ExecutionStage(0.0, 1.0, (staged,)),), 0.1)
    assert plan.seconds == 1.0
    assert document.from_dict(StagePlan, document.to_dict(plan), "plan") == plan
    with pytest.raises(InputError, match="version 2"):
        StagePlan(2, "samullm", 2, 2, (), 0.1)
