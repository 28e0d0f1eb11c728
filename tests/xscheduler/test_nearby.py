"""A short search near another problem's answer: a lower bound, close to the best, for few evaluations."""

from dataclasses import replace

import pytest

from xcore.specs.bound import ALL_REQUESTS
from xscheduler.advice import LOOSER
from xscheduler.nearby import Nearby
from xscheduler.setting_search import SearchOptions, advise, search_schedule
from xscheduler.settings import find_setting
from xscheduler.spaces import POLICIES
from xscheduler.tune import SLACK

ASKED = {
    "orca": ("llama-3.1-8b", "1xH100-SXM", "2048/256", 12.0, "1xH200-SXM"),
    "chunked": ("llama-3.1-8b", "1xL40S", "512/128", 5.0, "2xL40S"),
    "waa-c": ("llama-3.1-8b", "2xL40S", "512/128", 20.0, "4xL40S"),
    "rra": ("opt-13b", "2xA40", "T", 8.0, "2xL40S"),
}


@pytest.mark.parametrize("policy", ASKED)
@pytest.mark.parametrize("changed", ["bound", "cluster"])
def test_a_lower_bound_that_is_close_to_the_best_schedules_throughput(policy, changed):
    model, cluster, workload, bound_s, there = ASKED[policy]
    found = search_schedule(find_setting(model, cluster, workload), bound_s, policies=(policy,))
    if changed == "bound":
        setting, bound_s, floor = (
            find_setting(model, cluster, workload),
            LOOSER * bound_s,
            found.estimate.throughput_tok_s,
        )
    else:
        setting, floor = find_setting(model, there, workload), 0.0
    best = search_schedule(setting, bound_s, policies=(policy,))
    near = Nearby(found.schedule, 40)
    short = search_schedule(setting, bound_s, policies=(policy,), floor=floor, near=near)
    reached = short.estimate.throughput_tok_s if short.estimate else floor
    assert 0.96 * best.estimate.throughput_tok_s <= reached <= best.estimate.throughput_tok_s * (1 + 2 * SLACK)
    assert short.search.evaluations <= max(60, best.search.evaluations / 2)
    if short.schedule:
        assert short.schedule.policy == policy and short.estimate.latency_s <= bound_s and reached > floor
    above = search_schedule(setting, bound_s, policies=(policy,), floor=1.001 * reached, near=near)
    assert above.schedule is None and above.alternatives == ()


@pytest.mark.parametrize("name", ["orca", "chunked"])
def test_advice_takes_a_third_of_the_answers_evaluations(name, monkeypatch):
    model, cluster, workload, bound_s, _ = ASKED[name]
    setting, evaluations = find_setting(model, cluster, workload), []
    options = SearchOptions(ALL_REQUESTS, None, None, POLICIES, "bnb", 0.0)
    answer = search_schedule(setting, bound_s, **vars(options))

    def counted(*where, **how):
        found = search_schedule(*where, **how)
        evaluations.append(found.search.evaluations)
        return found

    monkeypatch.setattr("xscheduler.setting_search.search_schedule", counted)
    texts = advise(setting, answer, bound_s, options)
    assert len(evaluations) == 3 and sum(evaluations) <= answer.search.evaluations / 3
    assert sum("would give at least" in text for text in texts) >= 2


def test_a_device_on_which_a_short_search_finds_nothing_is_searched_wholly(monkeypatch):
    setting = find_setting("opt-13b", "2xA40", "T")
    options = SearchOptions(ALL_REQUESTS, None, None, ("orca", "static"), "bnb", 0.0)
    answer, asked = search_schedule(setting, 8.0, **vars(options)), []

    def nothing_nearby(*where, near=None, **how):
        asked.append((near is not None, how["policies"], how["floor"] > 0))
        found = search_schedule(*where, near=near, **how)
        return replace(found, schedule=None, estimate=None) if near else found

    monkeypatch.setattr("xscheduler.setting_search.search_schedule", nothing_nearby)
    *_, kind = advise(setting, answer, 8.0, options)
    best = answer.schedule.policy
    assert asked[:3] == [(True, (best,), True), (True, (best,), True), (True, (best,), False)]
    assert asked[3:] == [(False, ("orca", "static"), False)]
    assert "the next device kind by memory bandwidth) would give at least" in kind
