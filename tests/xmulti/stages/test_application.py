"""Edges of all kinds: what calls read, and what they wait for."""

import numpy as np
import pytest

from tests.xmulti.stages import applications
from xcore.errors import InputError
from xmulti.files.call_graph import CallGraph, GraphEdge, GraphNode
from xmulti.stages.application import draw


def drawn(nodes, edges, **options):
    graph = CallGraph(nodes, tuple(GraphEdge(*edge) for edge in edges))
    return draw(graph, applications.table(), **options).nodes


def source(name, *prompts, **options):
    return GraphNode(name, "small", prompts, **options)


def waits(node):
    return {name: places.tolist() for name, places in node.needs}


def test_concatenated_outputs_lengthen_the_prompts():
    nodes = drawn(
        (source("a", 5, 6, 7), source("b", 8, 9, 10), source("c", 1, 2, 3, prompt=4)), (("a", "c"), ("b", "c"))
    )
    a, b, c = (nodes[name].calls for name in "abc")
    assert (c.prompts == np.array([5, 6, 7]) + a.outputs + b.outputs).all()
    assert waits(nodes["c"]) == {"a": [0, 1, 2], "b": [0, 1, 2]}


def test_separate_outputs_are_calls_of_their_own():
    edges = (("a", "c", "separate"), ("b", "c", "separate"))
    nodes = drawn((source("a", 5, 6), source("b", 7), source("c", prompt=4)), edges)
    outputs = [*nodes["a"].calls.outputs, *nodes["b"].calls.outputs]
    assert nodes["c"].calls.prompts.tolist() == [4 + tokens for tokens in outputs]
    assert waits(nodes["c"]) == {"a": [0, 1, -1], "b": [-1, -1, 0]}


def test_rounds_read_the_round_before():
    nodes = drawn((source("a", 30, 40, 50, rounds=(3, 1, 2)),), (("a", "a"),))
    calls = nodes["a"].calls
    assert calls.following.tolist() == [1, 2, -1, -1, 5, -1]
    assert calls.first.tolist() == [0, 3, 4]
    before = calls.outputs
    assert calls.prompts.tolist() == [30, 30 + before[0], 30 + before[1], 40, 50, 50 + before[4]]


@pytest.mark.parametrize("kind", ["final", "concatenate", "separate"])
def test_what_is_read_of_several_rounds(kind):
    loop = source("a", 30, 40, rounds=(3, 1))
    nodes = drawn((loop, source("b", prompt=2)), (("a", "a"), ("a", "b", kind)))
    outputs = nodes["a"].calls.outputs
    read = {"final": [outputs[2], outputs[3]], "concatenate": [outputs[:3].sum(), outputs[3]], "separate": outputs}
    assert nodes["b"].calls.prompts.tolist() == [2 + tokens for tokens in read[kind]]
    assert waits(nodes["b"]) == {"a": [2, 3] if kind != "separate" else [0, 1, 2, 3]}


def test_calls_are_asked_so_many_times():
    nodes = drawn((source("a", 30, 40), source("b", prompt=2, times=3, longest_output=8)), (("a", "b"),))
    assert waits(nodes["b"]) == {"a": [0, 0, 0, 1, 1, 1]}
    assert nodes["b"].calls.outputs.max() <= 8


def test_seeds_and_shared_quantiles():
    nodes = (source("a", *[5] * 50), source("b", *[5] * 50))
    own, again, other = drawn(nodes, ()), drawn(nodes, ()), drawn(nodes, (), seed=1)
    assert (own["a"].calls.outputs == again["a"].calls.outputs).all()
    assert (own["a"].calls.outputs != other["a"].calls.outputs).any()
    assert (own["a"].calls.outputs != own["b"].calls.outputs).any()
    shared = drawn(nodes, (), shared_quantiles=True)
    assert (shared["a"].calls.outputs == shared["b"].calls.outputs).all()


def test_what_cannot_be_drawn():
    with pytest.raises(InputError, match="no model 'large'"):
        drawn((GraphNode("a", "large", (1,)),), ())
    with pytest.raises(InputError, match="has 3 calls, but reads 2"):
        drawn((source("a", 5, 6), source("b", 1, 2, 3)), (("a", "b"),))
    with pytest.raises(InputError, match="fills the context"):
        drawn((source("a", 512),), ())
