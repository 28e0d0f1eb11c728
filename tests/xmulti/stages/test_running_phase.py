"""Plans as they run: as planned on the planned outputs, and to the end on any others."""

import random

import pytest

from tests.xmulti.stages import applications
from xmulti.stages.application import draw
from xmulti.stages.greedy_stages import Host, PlannedStage, greedy_stage, makespan, plan_stages
from xmulti.stages.running_phase import execute
from xmulti.stages.stage_heuristics import max_stage, min_stage
from xmulti.stages.stage_progress import Parallel

METHODS = [(greedy_stage, True), (greedy_stage, False), (max_stage, True), (min_stage, True), (min_stage, False)]
MADE = {
    "two": applications.ensemble(2, 60),
    "five": applications.ensemble(5, 40),
    "chain": applications.chain_and_judge(12),
}


def expected_work(application):
    calls = {name: node.calls for name, node in application.nodes.items()}
    return {name: application.work(name).of(of_one.prompts + of_one.outputs - 1.0) for name, of_one in calls.items()}


def check(application, executed, host):
    assert executed.work == pytest.approx(expected_work(application), rel=1e-9), "all calls are computed, and once"
    assert set(executed.ends) == set(application.nodes)
    assert 0 <= executed.idle <= executed.not_computing < 1
    for stage in executed.stages:
        devices = [device for node in stage.nodes for device in node.devices]
        assert len(devices) == len(set(devices)) <= host.devices
        running = {node.name for node in stage.nodes}
        for name in running:
            for source in application.nodes[name].sources:
                assert source in running or executed.ends[source] <= stage.start_s


@pytest.mark.parametrize("method", METHODS, ids=lambda method: f"{method[0].__name__}-{method[1]}")
@pytest.mark.parametrize("name", MADE)
def test_planned_outputs_take_the_planned_time(name, method):
    application, host = draw(*MADE[name]), Host(4, 1)
    stages = plan_stages(application, host, *method)
    executed = execute(application, host, stages)
    assert executed.seconds == pytest.approx(makespan(stages), rel=1e-6)
    assert executed.moves == 0
    check(application, executed, host)
    ran = [{node.name: Parallel(node.dp, node.tp) for node in stage.nodes} for stage in executed.stages]
    again = [PlannedStage(0.0, 1.0, stage) for stage in ran]
    assert execute(application, host, again) == executed, "what ran can be written down as the plan"


@pytest.mark.parametrize("method", METHODS, ids=lambda method: f"{method[0].__name__}-{method[1]}")
@pytest.mark.parametrize("name", MADE)
def test_other_outputs_are_all_made(name, method):
    host = Host(4, 2)
    stages = plan_stages(draw(*MADE[name]), host, *method)
    for seed in range(1, 6):
        application = draw(*MADE[name], seed=seed)
        check(application, execute(application, host, stages), host)


def test_random_plans_run_to_the_end():
    """Plans that were made for something else entirely: every rule meets every state."""
    rng = random.Random(3)
    host, moves = Host(4, 2), 0
    ways = [Parallel(1, 1), Parallel(2, 1), Parallel(1, 2), Parallel(3, 1), Parallel(4, 1)]
    for _ in range(60):
        application = draw(*MADE[rng.choice(["five", "chain"])], seed=rng.randint(0, 99))
        names, stages = list(application.nodes), []
        for _ in range(rng.randint(1, 5)):
            stage, room = {}, 4
            for name in rng.sample(names, len(names)):
                way = rng.choice(ways)
                if way.gpus <= room:
                    stage[name], room = way, room - way.gpus
            if "judge" in stage:
                stage.pop("judge")
            stages.append(PlannedStage(0.0, 1.0, stage))
        stages += [PlannedStage(0.0, 1.0, {name: rng.choice(ways)}) for name in names]
        executed = execute(application, host, stages)
        check(application, executed, host)
        moves += executed.moves
    assert moves > 0


def test_a_node_that_is_planned_no_more_keeps_running():
    """The plan thought that n1 would be done with the first stage; n0 is, and n1 goes on as it runs."""
    application, host = draw(*applications.ensemble(3, 30)), Host(2, 1)
    one = Parallel(1, 1)
    stages = [PlannedStage(0, 1, {"n0": one, "n1": one}), PlannedStage(1, 2, {"n2": Parallel(2, 1)})]
    executed = execute(application, host, stages)
    names = [[(node.name, node.dp) for node in stage.nodes] for stage in executed.stages]
    assert names == [[("n0", 1), ("n1", 1)], [("n1", 1)], [("n2", 2)]]


def test_a_node_of_a_later_stage_runs_on_where_gpus_remain():
    application, host = draw(*applications.ensemble(3, 30)), Host(2, 1)
    one = Parallel(1, 1)
    first, last = PlannedStage(0, 1, {"n0": one, "n1": one}), PlannedStage(2, 3, {"n1": one})
    stages = [first, PlannedStage(1, 2, {"n2": one}), last]
    names = [{node.name for node in stage.nodes} for stage in execute(application, host, stages).stages]
    assert names[:2] == [{"n0", "n1"}, {"n1", "n2"}]
    stages[1] = PlannedStage(1, 2, {"n2": Parallel(2, 1)})
    names = [{node.name for node in stage.nodes} for stage in execute(application, host, stages).stages]
    assert names[:2] == [{"n0", "n1"}, {"n2"}]


def test_a_stage_whose_end_has_come_before_its_turn_leaves_no_gpu_idle():
    """The second stage was to last until n0 is done, which it is before; so n2 need not wait for n1."""
    application, host = draw(*applications.ensemble(3, 30)), Host(2, 1)
    one = Parallel(1, 1)
    placed = ({"n0": one, "n1": one}, {"n0": one, "n1": one}, {"n1": one, "n2": one})
    executed = execute(application, host, [PlannedStage(0.0, 1.0, stage) for stage in placed])
    assert [{node.name for node in stage.nodes} for stage in executed.stages][:2] == [{"n0", "n1"}, {"n1", "n2"}]


def test_no_stage_is_passed_that_has_nodes_without_gpus():
    """n0 is done before the second stage's turn, which n2 must wait for; nothing of the third begins before it."""
    application, host = draw(*applications.ensemble(4, 30)), Host(2, 1)
    one, two = Parallel(1, 1), Parallel(2, 1)
    placed = ({"n0": one, "n1": one}, {"n0": one, "n2": two}, {"n3": one})
    executed = execute(application, host, [PlannedStage(0.0, 1.0, stage) for stage in placed])
    order = [{node.name for node in stage.nodes} for stage in executed.stages]
    assert order == [{"n0", "n1"}, {"n1"}, {"n2"}, {"n3"}]


def test_every_gpu_of_a_node_loads():
    application, way = draw(*applications.ensemble(1, 30)), Parallel(2, 1)
    (name, node), host = next(iter(application.nodes.items())), Host(2, 1)
    executed = execute(application, host, [PlannedStage(0.0, 1.0, {name: way})])
    assert executed.loading_gpu_s == pytest.approx(2 * application.load_s[node.model, 1])
    assert 0 < executed.loading_gpu_s < 2 * executed.seconds
