"""Planning again for other rates: what is searched, when it is worth moving, and what stays where it is."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.xcore import small_specs
from xcore.quantity import figure_text
from xcore.specs.cluster import parse_cluster
from xcore.specs.cluster_plan import Plan, PlannedModel, Share
from xmulti.plans import model_frontier, planning
from xmulti.plans.demands import ModelDemand
from xmulti.plans.mean_batch_one_latency import mean_batch_one_latency
from xmulti.plans.planning import make_plan
from xmulti.serving import replan as replanning
from xmulti.serving.replan import (
    ROOM,
    WORTH,
    ReplanInput,
    Watched,
    at_rates_of,
    in_a_process,
    moving_least,
    next_interval_s,
    promise_error,
    replan,
    why_not_watched,
)
from xmulti.sharing.replacement import BETA, FIRST_S, LONGEST_S, next_interval
from xscheduler.settings import find_setting

CLUSTER = parse_cluster("4xA40", 0.92)
RATES = {"chat": 9.0, "code": 3.0}
BOUND_S = 6.0


@pytest.fixture(scope="module")
def setting():
    return find_setting("opt-1.3b", "4xA40", "128/64", None)


def demands_at(setting, rates):
    return tuple(ModelDemand(name, setting, rate, None, BOUND_S) for name, rate in rates.items())


@pytest.fixture(scope="module")
def plan(setting):
    """Devices in proportion to what is computed: three, and one. Few requests are enough for a search to begin with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_frontier, "REQUESTS", 4000)
        return make_plan(demands_at(setting, RATES), CLUSTER, "spatial")


def asked(plan, setting, rates, latencies_s=()):
    workload = setting.workload.without_requests
    seen = (Watched(name, rate, setting.profile, workload, latencies_s) for name, rate in rates.items())
    return ReplanInput(plan, tuple(seen))


@pytest.fixture(scope="module")
def swapped(plan, setting):
    """What the process finds when three times as many come to the model that had a third."""
    return asyncio.run(in_a_process(asked(plan, setting, {"chat": 3.0, "code": 9.0})))


def budgets(plan):
    return {model.name: len(model.devices) for model in plan.models}


@pytest.mark.slow
def test_devices_follow_popularity(plan, setting, swapped):
    """To the plan that the method makes for the new rates, measured by the same replays as the one so far."""
    assert budgets(plan) == {"chat": 3, "code": 1}
    assert budgets(swapped.plan) == {"chat": 1, "code": 3} and not swapped.failed
    now = demands_at(setting, {"chat": 3.0, "code": 9.0})
    fresh = make_plan(now, CLUSTER, "spatial")
    assert swapped.plan.headroom == fresh.headroom > (1 + WORTH) * at_rates_of(plan, now).headroom
    assert {model.name: model.rate_seq_s for model in swapped.plan.models} == {"chat": 3.0, "code": 9.0}
    assert [model.schedule.latency_bound_s for model in swapped.plan.models] == [BOUND_S] * 2


def test_a_plan_that_is_nearly_as_good_stays(plan, setting):
    """Half as many more come to both: no other plan shares the devices out better."""
    found = replan(asked(plan, setting, {"chat": 13.5, "code": 4.5}))
    assert found.plan is None and not found.failed and "with another" in found.why


def test_a_plan_that_has_room_enough_stays(plan, setting, monkeypatch):
    """Hardly anything comes to either, in other shares than planned: nothing is searched."""
    monkeypatch.setattr(planning, "propose", None)
    found = replan(asked(plan, setting, {"chat": 0.1, "code": 0.3}))
    assert found.plan is None and not found.failed
    times = at_rates_of(plan, demands_at(setting, {"chat": 0.1, "code": 0.3})).headroom
    assert times > ROOM and found.why == f"all models can reach {figure_text(times)} times their rates"


def test_rates_that_no_plan_sustains_still_get_the_one_that_is_nearest(plan, setting):
    found = replan(asked(plan, setting, {"chat": 3.0, "code": 3000.0}))
    assert found.plan and found.plan.headroom < 1 and budgets(found.plan)["code"] == 3


def test_a_plan_of_several_nodes_keeps_each_model_on_one(setting, monkeypatch):
    """A server runs no engine on two nodes. Without that limit, `chat` gets both nodes that `code` leaves."""
    monkeypatch.setattr(model_frontier, "REQUESTS", 4000)
    cluster = parse_cluster("3x1xA40", 0.92)
    demands = demands_at(replace(setting, cluster=cluster), RATES)
    spans = make_plan(demands, cluster, "spatial")
    assert budgets(spans) == {"chat": 2, "code": 1} and spans.nodes_of(spans.models[0]) == (0, 1)
    plan = make_plan(tuple(replace(demand, one_node=True) for demand in demands), cluster, "spatial")
    assert budgets(plan) == {"chat": 1, "code": 1}
    assert replan(asked(plan, setting, {"chat": 12.0, "code": 1.0})).plan is None


def test_a_search_that_fails_says_why(plan, setting, monkeypatch):
    nowhere = replace(plan, cluster=replace(CLUSTER, device=replace(CLUSTER.device, memory_bytes=1e9)))
    found = asyncio.run(in_a_process(asked(nowhere, setting, {"chat": 3.0, "code": 9.0})))
    assert found.plan is None and found.failed and found.why
    monkeypatch.setattr(replanning, "_PROCESS", "import os; os._exit(3)")
    found = asyncio.run(in_a_process(asked(plan, setting, RATES)))
    assert found == (None, "the search was ended (exit code 3)", True, None)


def alive(pid):
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_search_ends_when_nobody_waits_for_it_any_more(setting, monkeypatch, tmp_path):
    """With the processes that it has started."""
    pids = tmp_path / "pids"
    program = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{child.pid}} ")
time.sleep(600)
"""
    monkeypatch.setattr(replanning, "_PROCESS", program)

    async def given_up():
        held = of_devices({"chat": (0, 1, 2), "code": (3,)})
        searching = asyncio.ensure_future(in_a_process(asked(held, setting, RATES)))
        while not pids.exists() or not pids.read_text().endswith(" "):
            await asyncio.sleep(0.05)
        searching.cancel()
        await asyncio.wait({searching})

    asyncio.run(given_up())
    until = time.monotonic() + 10
    while any(alive(pid) for pid in pids.read_text().split()):
        assert time.monotonic() < until
        time.sleep(0.05)


def of_devices(places, headrooms=None, method="seallm"):
    """A plan by hand: each model's devices, and how many times its rate it could have."""
    models = []
    for name, devices in places.items():
        alone = sum(set(devices) <= set(others) for others in places.values()) == 1
        times = (headrooms or {}).get(name, 1.0)
        schedule = small_specs.schedule("orca", kv_blocks=100 + len(devices))
        unknown = PlannedModel(name, devices, schedule, None, 1.0, times, directory=f"/{name}")
        models.append(replace(unknown, share=None if alone else Share("priority")))
    return Plan(Plan.VERSION, method, CLUSTER, tuple(models))


def devices(plan):
    return {model.name: model.devices for model in plan.models}


def test_what_need_not_move_does_not():
    """Two pairs change partners, a model alone is on other devices in the new plan, and stays."""
    held = of_devices({"a": (0,), "b": (0,), "c": (1,), "d": (1,), "e": (2, 3)}, {"e": 2.0})
    found = of_devices({"a": (2,), "c": (2,), "b": (3,), "d": (3,), "e": (0, 1)}, dict.fromkeys("abcde", 1.5))
    after = moving_least(replace(found, models=found.models[::-1]), held)
    assert devices(after) == {"e": (2, 3), "d": (0,), "b": (0,), "c": (1,), "a": (1,)}
    assert after.models[0] == held.models[-1]
    assert all(model.directory == f"/{model.name}" for model in after.models)


def test_what_would_be_the_tightest_moves():
    """With the schedule that it had, all models could have less than the new plan promises."""
    held = of_devices({"a": (0,), "b": (1,), "c": (1,)}, {"a": 1.4})
    found = of_devices({"a": (1,), "b": (0,), "c": (0,)}, dict.fromkeys("abc", 1.5))
    after = moving_least(found, held)
    assert after.headroom == 1.5 and after.models[0].schedule == found.models[0].schedule


def test_the_error_of_what_was_promised(plan, setting):
    """Half of the requests took as long as promised and were in time, half took twice as long and weren't."""
    promised = [replace(model, attainment=1.0, normalised_latency=2.0) for model in plan.models]
    demands = demands_at(setting, RATES)
    drawn = setting.workload.draw(200, 0, setting.model.context)
    alone_s = mean_batch_one_latency(setting, drawn)
    bounds = tuple(replace(demand, bound_s=3 * alone_s) for demand in demands)
    seen = asked(plan, setting, RATES, (2 * alone_s, 4 * alone_s)).watched
    error = promise_error(replace(plan, models=tuple(promised)), bounds, seen)
    assert error == pytest.approx(0.5)  # of both: 0.5 of 1, and 3 times the time alone of 2
    assert promise_error(plan, demands, asked(plan, setting, RATES).watched) is None, "nothing was answered"
    unknown = replace(plan, models=(replace(plan.models[0], attainment=None), plan.models[1]))
    assert promise_error(unknown, demands, seen) is None


def test_a_plan_stays_for_seallms_interval():
    assert next_interval_s(None, None) == FIRST_S == next_interval_s(FIRST_S, None)
    assert next_interval_s(FIRST_S, 2 * BETA) == next_interval(FIRST_S, 2 * BETA) < FIRST_S
    assert next_interval_s(LONGEST_S, 0.0) == LONGEST_S


def test_plans_in_whose_place_none_can_be_searched(plan):
    assert why_not_watched(plan) == ""
    assert why_not_watched(replace(plan, method="by hand")).startswith("its method 'by hand' is none of exegpt, ")
    unrated = replace(plan.models[1], rate_seq_s=None, requests=5)
    assert why_not_watched(replace(plan, models=(plan.models[0], unrated))) == (
        "model 'code' was planned without a rate"
    )
