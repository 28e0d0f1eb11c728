"""The demo's plan: a bound that its best schedule holds, and as many requests as a minute allows."""

import pytest

from exegpt.api import demo
from xscheduler.settings import find_setting
from xscheduler.ties import TIE
from xsimulator.replay.event_simulator import replay


@pytest.mark.slow
def test_line_19_the_demos_bound_is_one_that_its_best_schedule_holds_with_room(tiny, tiny_profile):
    setting = find_setting(str(tiny), "local", "T", str(tiny_profile))
    bounds = demo.places(demo.search_frontier(setting))
    plan = demo.make_plan(setting, bounds, None, 0)
    assert plan.schedules[0] == plan.answer.schedule
    lengths = [request.lengths for request in plan.requests]
    runs = [replay(schedule, setting.profile, lengths) for schedule in plan.schedules]
    assert all(run.estimate.latency_s <= plan.bound_s / (1 + demo.ROOM) for run in runs)
    assert runs[0].seconds <= min(run.seconds for run in runs) / (1 - TIE)
    assert plan.answer.schedule.latency_bound_s == plan.bound_s
    assert demo.LEAST <= len(plan.requests) <= demo.MOST
