"""An application's calls as they run: beside the planner's lengths of the same ones, whatever ends first."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.xmulti.stages import applications
from xcore.errors import InputError
from xcore.specs.cost_table import CostTable
from xmulti.files.call_graph import CallGraph, GraphEdge, GraphNode
from xmulti.files.dependent_calls import DependentCalls
from xmulti.stages.application import draw

TABLE = CostTable(CostTable.VERSION, "imagined", "host", (applications.model(context=100_000),))


@st.composite
def graphs(draw_):
    """Up to four nodes, each with own calls or others', rounds and repetitions; some join what can't be joined."""
    nodes, edges = [], []
    for k in range(draw_(st.integers(1, 4))):
        name, sources = f"n{k}", [node.name for node in nodes]
        read = draw_(st.lists(st.sampled_from(sources), unique=True, max_size=2)) if sources else []
        kind = draw_(st.sampled_from(["concatenate", "final", "separate"]))
        edges += [GraphEdge(source, name, kind) for source in read]
        own = () if read and (kind == "separate" or draw_(st.booleans())) else (5, 6, 7)[: draw_(st.integers(2, 3))]
        rounds = tuple(draw_(st.integers(1, 3)) for _ in own) if own and draw_(st.booleans()) else ()
        edges += [GraphEdge(name, name)] if rounds else []
        times = draw_(st.sampled_from([1, 1, 2]))
        nodes.append(GraphNode(name, "small", own, draw_(st.integers(0, 3)), rounds, times=times))
    return CallGraph(tuple(nodes), tuple(edges))


def calls_of(graph, unit=lambda tokens: tokens, **options):
    """Calls in numbers of tokens, or in whatever `unit` makes of them."""
    own = {
        node.name: [[unit(p)] * r for p, r in zip(node.prompts, node.rounds or (1,) * len(node.prompts), strict=True)]
        for node in graph.nodes
    }
    return DependentCalls(graph, own, {node.name: unit(node.prompt) for node in graph.nodes}, **options)


@settings(max_examples=300, deadline=None)
@given(graphs(), st.integers(0, 2**32))
def test_prompts_are_those_that_are_planned_for(graph, seed):
    try:
        nodes = draw(graph, TABLE).nodes
    except InputError:
        with pytest.raises(InputError, match="joins"):
            calls_of(graph)
        return
    calls, tuples = calls_of(graph), calls_of(graph, lambda tokens: (0,) * tokens)
    firsts = {name: of.calls.first.tolist() for name, of in nodes.items()}
    running, twins = calls.begin(), {chain.name: chain for chain in tuples.begin()}
    seen = set()
    pick = random.Random(seed)
    while running:
        chain = running.pop(pick.randrange(len(running)))
        name, twin = chain.name, twins[chain.name]
        assert name not in seen
        seen.add(name)
        place = firsts[chain.node.name][chain.index] + len(chain.outputs)
        of = nodes[chain.node.name].calls
        assert calls.prompt(chain) == len(tuples.prompt(twin)) == of.prompts[place]
        output = int(of.outputs[place])
        begun = calls.end(chain, output)
        twins |= {other.name: other for other in tuples.end(twin, (1,) * output)}
        running += begun
    assert calls.left == tuples.left == 0 and len(seen) == sum(len(of.calls.prompts) for of in nodes.values())


def test_a_prompt_has_its_own_tokens_first_then_the_sources_in_their_order():
    nodes = (GraphNode("a", "m", (1,)), GraphNode("b", "m", (1,), rounds=(2,)), GraphNode("c", "m", (1,), 1))
    graph = CallGraph(nodes, (GraphEdge("b", "b"), GraphEdge("a", "c"), GraphEdge("b", "c")))
    own = {"a": [[(1,)]], "b": [[(2,), (3,)]], "c": [[(4,)]]}
    calls = DependentCalls(graph, own, {"a": (), "b": (), "c": (5,)})
    a, b = calls.begin()
    assert calls.prompt(b) == (2,) and calls.end(b, (20, 21)) == [b]
    assert calls.prompt(b) == (3, 20, 21)
    assert calls.end(a, (10,)) == []
    (c,) = calls.end(b, (30,))
    assert calls.prompt(c) == (4, 5, 10, 20, 21, 30)


def test_outputs_are_read_as_the_reader_takes_them():
    graph = CallGraph((GraphNode("a", "m", (1,)), GraphNode("b", "m")), (GraphEdge("a", "b"),))

    def read(source, reader, ids):
        return (*ids, ord(source.name), ord(reader.name))

    calls = DependentCalls(graph, {"a": [[(1,)]]}, {"a": (), "b": ()}, read)
    (b,) = calls.end(calls.begin()[0], (7,))
    assert calls.prompt(b) == (7, ord("a"), ord("b"))


def test_in_turn_no_node_begins_before_the_one_in_front_has_ended():
    nodes = (GraphNode("a", "m", (1, 1)), GraphNode("b", "m", (1, 1), rounds=(1, 2)), GraphNode("c", "m"))
    graph = CallGraph(nodes, (GraphEdge("b", "b"), GraphEdge("a", "c")))
    calls = calls_of(graph, in_turn=True)
    first, second = calls.begin()
    assert {first.node.name, second.node.name} == {"a"}
    assert calls.end(first, 1) == []
    begun = calls.end(second, 1)
    assert [chain.name for chain in begun] == ["b/0/0", "b/1/0"]
    assert calls.end(begun[1], 1) == [begun[1]] and calls.end(begun[0], 1) == []
    assert [chain.name for chain in calls.end(begun[1], 1)] == ["c/0/0", "c/1/0"]
    together = [chain.name for chain in calls_of(graph).begin()]
    assert together == ["a/0/0", "a/1/0", "b/0/0", "b/1/0"]
