"""Plans of stages: GPUs, dependencies and bounds hold; the complete search is as good as all plans tried out."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from tests.xmulti.stages import applications
from xcore.errors import InputError
from xmulti.files.call_graph import CallGraph, GraphEdge, GraphNode
from xmulti.stages.application import draw
from xmulti.stages.greedy_stages import Host, candidates, follow, go_on, gpus, greedy_stage, makespan, plan_stages
from xmulti.stages.stage_heuristics import max_stage, min_stage
from xmulti.stages.stage_progress import Parallel, Progress
from xmulti.stages.stage_search import best_stages, every_stage, lower_bound_s
from xmulti.stages.stage_variations import varied_stages

METHODS = [(greedy_stage, True), (greedy_stage, False), (max_stage, True), (min_stage, True), (min_stage, False)]
MADE = {
    "one": applications.ensemble(1),
    "two": applications.ensemble(2, 60),
    "five": applications.ensemble(5, 40),
    "chain": applications.chain_and_judge(12),
}


@pytest.fixture(params=MADE)
def application(request):
    return draw(*MADE[request.param])


def replayed(application, stages):
    """States before and after each stage, as the plan has them."""
    progress = Progress.beginning(application)
    for stage in stages:
        outlook = progress.outlook(stage.placed)
        after = progress.stopped(stage.placed).advance(outlook, outlook.end_s)
        yield progress, stage, after
        progress = after


@pytest.mark.parametrize("method", METHODS, ids=lambda method: f"{method[0].__name__}-{method[1]}")
@pytest.mark.parametrize("host", [Host(1, 1), Host(4, 2), Host(8, 1)], ids=str)
def test_every_plan_holds_its_limits(application, method, host):
    stages = plan_stages(application, host, *method)
    bound = lower_bound_s(Progress.beginning(application), host)
    assert 0 < bound <= makespan(stages)
    for progress, stage, after in replayed(application, stages):
        assert 0 < gpus(stage.placed) <= host.devices
        assert all(way.tp <= host.linked for way in stage.placed.values())
        assert all(progress.can_run(name, stage.placed) for name in stage.placed)
        assert progress.now == stage.start_s < stage.end_s == after.now
        assert progress.now + lower_bound_s(progress, host) <= makespan(stages) + 1e-9
        if not method[1]:
            assert all(stage.placed[name] == run.parallel for name, run in progress.runs.items())
    assert not after.unfinished


@pytest.mark.parametrize("name", ["one", "two"])
@pytest.mark.parametrize("host", [Host(2, 1), Host(2, 2)], ids=str)
def test_the_complete_search_is_the_best_of_all_plans(name, host):
    application = draw(*MADE[name])

    def best_of_all(progress):
        if not progress.unfinished:
            return progress.now
        names = progress.unfinished
        ways = [None, Parallel(1, 1), Parallel(2, 1), *([Parallel(1, 2)] if host.linked == 2 else [])]
        ends = []
        for chosen in itertools.product(ways, repeat=len(names)):
            stage = {node: way for node, way in zip(names, chosen, strict=True) if way}
            if stage and gpus(stage) <= host.devices:
                outlook = progress.outlook(stage)
                ends.append(best_of_all(progress.stopped(stage).advance(outlook, outlook.end_s)))
        return min(ends)

    best = makespan(best_stages(application, host, None, None))
    assert best == pytest.approx(best_of_all(Progress.beginning(application)), rel=1e-12)
    assert all(best <= makespan(plan_stages(application, host, *method)) + 1e-9 for method in METHODS)


@pytest.mark.parametrize("preempt", [True, False])
def test_the_first_descent_is_the_greedy_and_more_plans_are_never_worse(application, preempt):
    host = Host(4, 2)
    greedy = plan_stages(application, host, greedy_stage, preempt)
    first = best_stages(application, host, 5, 1, preempt)
    assert [stage.placed for stage in first] == [stage.placed for stage in greedy]
    few, more = (makespan(best_stages(application, host, 3, plans, preempt)) for plans in (4, 12))
    assert more <= few <= makespan(greedy)


def test_the_search_finds_what_the_greedy_misses():
    """One at least of these; else the search does nothing."""
    gains = []
    for count, calls in itertools.product((2, 3), (20, 60, 150)):
        application = draw(*applications.ensemble(count, calls))
        greedy = makespan(plan_stages(application, Host(2, 2)))
        gains.append(greedy / makespan(best_stages(application, Host(2, 2), 20, 20)))
    assert min(gains) >= 1 < max(gains)


@pytest.mark.parametrize("preempt", [True, False])
def test_one_other_stage_is_never_worse_than_none(application, preempt):
    host = Host(4, 2)
    varied = varied_stages(application, host, 4, preempt)
    assert makespan(varied) <= makespan(plan_stages(application, host, greedy_stage, preempt))
    assert not [*replayed(application, varied)][-1][2].unfinished


def test_one_other_stage_is_the_best_of_all_such_plans():
    """On one state tried out by hand: every stage for the first, then the greedy."""
    application, host = draw(*applications.ensemble(3, 60)), Host(2, 2)
    beginning = Progress.beginning(application)
    plans = []
    for stage in every_stage(beginning, host, {}):
        planned, after = follow(beginning, stage)
        plans.append((planned, *go_on(after, host, greedy_stage, True)))
    best = min(makespan(plan) for plan in plans)
    varied = makespan(varied_stages(application, host, None))
    assert varied <= best < makespan(plan_stages(application, host))
    assert makespan(best_stages(application, host, None, None)) <= varied


def test_every_stage_has_all_stages():
    progress = Progress.beginning(draw(*MADE["chain"]))
    stages = list(every_stage(progress, Host(2, 1), {}))
    assert {"chain": Parallel(1, 1), "judge": Parallel(1, 1)} in stages
    assert {"judge": Parallel(1, 1)} not in stages
    assert len(stages) == len({tuple(sorted(stage.items())) for stage in stages}) == 2 + 2 + 1 + 1
    one_more = list(candidates(progress, Host(2, 1), {"chain": Parallel(1, 1)}, {}))
    assert {"chain": Parallel(2, 1)} in one_more and {"chain": Parallel(1, 1)} not in one_more


def test_max_gives_one_node_all_gpus_and_min_shares_them_evenly():
    progress = Progress.beginning(draw(*MADE["five"]))
    (way,) = max_stage(progress, Host(4, 2)).values()
    assert way.gpus == 4
    assert [way.gpus for way in min_stage(progress, Host(4, 2)).values()] == [1, 1, 1, 1]
    assert sorted(way.gpus for way in min_stage(progress, Host(8, 2)).values()) == [1, 1, 2, 2, 2]
    two = Progress.beginning(draw(*MADE["two"]))
    assert [way.gpus for way in min_stage(two, Host(8, 2)).values()] == [4, 4]


def test_a_model_that_needs_more_linked_gpus_is_refused():
    graph = CallGraph((GraphNode("a", "m", (5,)),), (GraphEdge("a", "a"),))
    wide = applications.model("m")
    wide = type(wide)("m", 512, wide.degrees[1:], wide.outputs)
    application = draw(graph, applications.table(wide))
    assert np.isfinite(makespan(plan_stages(application, Host(2, 2))))
    with pytest.raises(InputError, match="can't run on a group of 1 or fewer linked"):
        plan_stages(application, Host(2, 1))
    with pytest.raises(InputError, match="groups of 2"):
        Host(3, 2)


def outlooks(throughputs, runs=()):
    """A state in which the nodes a and b have these throughputs by their GPUs; `runs` go on with as many."""
    nodes = {name: SimpleNamespace(model=name) for name in "ab"}
    application = SimpleNamespace(nodes=nodes, replicas={"a": (1,), "b": (1,)})
    return SimpleNamespace(
        application=application,
        unfinished=("a", "b"),
        runs={name: SimpleNamespace(parallel=Parallel(count, 1)) for name, count in runs},
        can_run=lambda name, stage: True,
        outlook=lambda stage: SimpleNamespace(
            throughput=sum(throughputs[n][gpus({n: way})] for n, way in stage.items())
        ),
    )


@pytest.mark.parametrize(
    ("a", "b", "chosen"),
    [
        ((0, 10, 30, 34, 34), (0, 5, 9, 9, 9), {"a": 3, "b": 1}),  # 15 a GPU; then 5 rather than twice 4.5; then 4
        ((0, 10, 12, 12, 12), (0, 2, 9, 20, 20), {"a": 1, "b": 3}),  # three for 20 rather than one for 2
        ((0, 10, 9, 9, 9), (0, 0, 0, 0, 0), {"a": 1}),  # what brings nothing is left
    ],
)
def test_the_greedy_takes_the_gpus_that_bring_most_each(a, b, chosen):
    stage = greedy_stage(outlooks({"a": a, "b": b}), Host(4, 1))
    assert {name: way.gpus for name, way in stage.items()} == chosen


def test_the_greedy_begins_with_the_gpu_that_brings_most():
    """2 rather than twice 1.95."""
    stage = greedy_stage(outlooks({"a": (0, 2, 2), "b": (0, 0.5, 3.9)}), Host(2, 1))
    assert {name: way.gpus for name, way in stage.items()} == {"a": 1, "b": 1}


def test_the_greedy_stops_what_runs_unless_it_may_not():
    throughputs = {"a": (0, 10, 10, 10, 10), "b": (0, 1, 2, 3, 4)}
    state = outlooks(throughputs, [("b", 4)])
    assert {name: way.gpus for name, way in greedy_stage(state, Host(4, 1)).items()} == {"a": 1, "b": 3}
    assert {name: way.gpus for name, way in greedy_stage(state, Host(4, 1), preempt=False).items()} == {"b": 4}


def test_nodes_that_are_locked_leave_the_others_to_choose_from():
    state, locked = outlooks({}), {"a": Parallel(1, 1)}
    found = [{name: way.gpus for name, way in stage.items()} for stage in candidates(state, Host(4, 1), locked, locked)]
    assert found == [{"a": 1, "b": more} for more in (1, 2, 3)]
