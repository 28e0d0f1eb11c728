"""Calls that wait for each other, through a plan: beside the replay of requests that wait for nothing."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.xsimulator.replay.test_event_simulator import MODEL, PROFILE, plans, schedule, stages_of
from xcore.specs.cluster import parse_cluster
from xcore.specs.cluster_plan import Plan, PlannedModel, Share
from xcore.specs.request_times import summarise
from xcore.specs.workload import RequestLengths
from xmulti.files.call_graph import CallGraph, GraphEdge, GraphNode
from xmulti.files.dependent_calls import DependentCalls
from xmulti.sharing.call_replay import replay_calls
from xmulti.sharing.plan_replay import replay_models
from xsimulator.replay.event_simulator import replay

LENGTHS = st.lists(st.builds(RequestLengths, st.integers(1, 90), st.integers(1, 40)), min_size=1, max_size=20)
UNKNOWN = summarise((), 0.0)


def plan_of(*models):
    return Plan(Plan.VERSION, "test", parse_cluster("4xA40"), models)


def planned(name, made, share=None, first=0):
    count = sum(stage.tp for stage in made.stages) * made.replicas
    return PlannedModel(name, tuple(range(first, first + count)), made, UNKNOWN, share=share)


def run(plan, nodes, edges, outputs, profile=PROFILE):
    """`outputs` of each node's calls, round after round."""
    graph = CallGraph(nodes, edges)
    own = {n.name: [[p] * r for p, r in zip(n.prompts, n.rounds or (1,) * len(n.prompts), strict=True)] for n in nodes}
    calls = DependentCalls(graph, own, {node.name: node.prompt for node in nodes})
    on = {node.name: node.model for node in nodes}
    profiles = {model.name: profile for model in plan.models}
    return replay_calls(
        plan,
        lambda model: profiles[model.name],
        calls,
        on,
        lambda chain, prompt: outputs[chain.node.name][chain.index][len(chain.outputs)],
    )


def times(served):
    return sorted((s.start_s, s.first_token_s, s.finish_s, s.input_tokens, s.output_tokens) for s in served)


def alone_s(made, prompt, output, profile=PROFILE):
    return replay(made, profile, [RequestLengths(prompt, output)], timeline=False).served[0].finish_s


@settings(max_examples=100, deadline=None)
@given(plans(), LENGTHS)
def test_calls_that_wait_for_none_are_requests(plan, requests):
    made, profile = replace(plan[0], replicas=1), plan[1]
    expected = replay(made, profile, requests, timeline=False).served
    node = GraphNode("n", "m", tuple(r.input for r in requests))
    found = run(plan_of(planned("m", made)), (node,), (), {"n": [[r.output] for r in requests]}, profile)
    for row, want in zip(times(found.served["m"]), times(expected), strict=True):
        assert row == pytest.approx(want, rel=1e-9)
    assert found.seconds == pytest.approx(max(s.finish_s for s in expected))


@pytest.mark.parametrize("share", [Share("time"), Share("time", pool="merged"), Share("space", 0.5), Share("priority")])
def test_models_that_share_are_as_their_unit(share):
    made = replace(schedule("orca"), admission="grow", kv_blocks=40)
    models = [planned(name, made, share) for name in ("a", "b")]
    lengths = {"a": [RequestLengths(40, 30)] * 7, "b": [RequestLengths(20, 11), RequestLengths(60, 25)] * 4}
    expected = replay_models(models, dict.fromkeys(lengths, PROFILE), lengths)
    nodes = tuple(GraphNode(name, name, tuple(r.input for r in rows)) for name, rows in lengths.items())
    outputs = {name: [[r.output] for r in rows] for name, rows in lengths.items()}
    found = run(plan_of(*models), nodes, (), outputs)
    for name in lengths:
        for row, want in zip(times(found.served[name]), times(expected[name].served), strict=True):
            assert row == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("policy", ["orca", "rra", "waa-m", "static"])
def test_rounds_follow_each_other(policy):
    sides = {"stages": stages_of(MODEL, "encode", 0, 1) + stages_of(MODEL, "decode", 1, 1)}
    made = schedule(policy, MODEL, cluster=parse_cluster("4xA40"), **(sides if policy == "waa-m" else {}))
    node = GraphNode("n", "m", (30,), rounds=(3,))
    found = run(plan_of(planned("m", made)), (node,), (GraphEdge("n", "n"),), {"n": [[5, 12, 9]]})
    expected = alone_s(made, 30, 5) + alone_s(made, 35, 12) + alone_s(made, 42, 9)
    assert found.seconds == pytest.approx(expected)
    assert [s.arrival_s for s in sorted(found.served["m"], key=lambda s: s.arrival_s)] == pytest.approx(
        [0.0, found.finish_s["n/0/0"], found.finish_s["n/0/1"]]
    )


def test_a_call_on_other_devices_begins_when_what_it_reads_is_there():
    made, wide = schedule("orca"), replace(schedule("orca"), admission="grow", kv_blocks=40)
    share = Share("time")
    plan = plan_of(planned("a", made), planned("b", wide, share, 1), planned("c", wide, share, 1))
    nodes = (GraphNode("x", "a", (30, 50)), GraphNode("y", "b", prompt=4), GraphNode("z", "c", (10,)))
    edges = (GraphEdge("x", "y", "separate"),)
    found = run(plan, nodes, edges, {"x": [[8], [40]], "y": [[6], [3]], "z": [[2]]})
    at = found.finish_s
    begun = {s.input_tokens: s.arrival_s for s in found.served["b"]}
    assert begun == pytest.approx({12: at["x/0/0"], 44: at["x/1/0"]})
    assert at["y/1/0"] == pytest.approx(at["x/1/0"] + alone_s(made, 44, 3), rel=1e-6)


@pytest.mark.parametrize("share", [None, Share("time")])
def test_a_call_that_reads_another_waits_for_its_front_end_too(share):
    late = replace(PROFILE, front_end_s=13e-3)
    made = schedule("orca") if share is None else replace(schedule("orca"), admission="grow", kv_blocks=40)
    models = [planned("m", made, share)] if share is None else [planned(name, made, share) for name in ("m", "other")]
    node = GraphNode("n", "m", (30,), rounds=(2,))
    found, bare = (run(plan_of(*models), (node,), (GraphEdge("n", "n"),), {"n": [[5, 12]]}, p) for p in (late, PROFILE))
    assert found.seconds == pytest.approx(bare.seconds + 2 * 13e-3)
    first, second = sorted(found.served["m"], key=lambda s: s.arrival_s)
    assert second.arrival_s == pytest.approx(first.finish_s)
    if share is None:
        assert (
            first.finish_s == pytest.approx(alone_s(made, 30, 5, late)) == pytest.approx(alone_s(made, 30, 5) + 13e-3)
        )
