"""The divisions of experts that a search tries: its answer is the best of searching each alone."""

from dataclasses import replace

import pytest

from xcore.specs.bound import ALL_REQUESTS
from xscheduler.expert_divisions import divided, divided_as, with_divisions
from xscheduler.goodput import RateBounds
from xscheduler.rate_sample import Arrivals
from xscheduler.setting_at_rates import search_at_rates
from xscheduler.setting_search import SearchOptions, advise, search_schedule
from xscheduler.settings import find_setting
from xsimulator import estimate

POLICIES = ("orca", "chunked", "rra")


def setting_of(model, cluster, workload="1024/128"):
    return with_divisions(find_setting(model, cluster, workload, "roofline"))


@pytest.mark.parametrize(
    ("model", "cluster", "asked"),
    [
        ("mixtral-8x7b", "2xH200-SXM", (None, None, ("orca",))),
        pytest.param("mixtral-8x7b", "4xA100-80GB", (6.0, None, POLICIES), marks=pytest.mark.slow),
        pytest.param("qwen3-30b-a3b", "8xH100-SXM", (None, 0.02, POLICIES), marks=pytest.mark.slow),
        pytest.param("qwen3-235b-a22b", "2x8xH200-SXM", (30.0, None, POLICIES), marks=pytest.mark.slow),
    ],
)
def test_each_policys_answer_is_the_best_of_all_divisions(model, cluster, asked):
    setting, (latency_s, tpot_s, policies) = setting_of(model, cluster), asked
    assert setting.divides and len(divided(setting)) > 2
    answer = search_schedule(setting, latency_s, tpot_s=tpot_s, policies=policies)
    alone = [search_schedule(one, latency_s, tpot_s=tpot_s, policies=policies) for one in divided(setting)]
    for place, best in enumerate(answer.alternatives):
        each = [a.alternatives[place].estimate.throughput_tok_s for a in alone if a.alternatives[place].estimate]
        assert best.estimate.throughput_tok_s == pytest.approx(max(each), rel=1e-3)  # smaller batches may lose 0.05 %
        there = divided_as(setting, best.schedule)
        assert there.model.experts == best.schedule.model.spec.experts
        again = estimate(best.schedule, there.on(best.policy).profile)
        assert again.throughput_tok_s == pytest.approx(best.estimate.throughput_tok_s, rel=1e-9)
    assert answer.search.evaluations < sum(a.search.evaluations for a in alone)


def test_a_division_without_any_schedule_does_not_explain_what_another_lacks():
    setting = setting_of("mixtral-8x7b", "2xH200-SXM")
    answer = search_schedule(setting, 1e-3, policies=POLICIES)
    alone = search_schedule(replace(setting, divides=False), 1e-3, policies=POLICIES)
    assert answer.schedule is None and answer.lowest_latency_s <= alone.lowest_latency_s
    assert all("its lowest latency is" in other.reason for other in answer.alternatives)


def test_advice_stays_with_the_answers_division():
    setting = setting_of("mixtral-8x7b", "2xH200-SXM")
    options = SearchOptions(ALL_REQUESTS, None, None, ("chunked",), "bnb", 0.0)
    answer = search_schedule(setting, None, **vars(options))
    there = replace(divided_as(setting, answer.schedule), divides=False)
    assert advise(setting, answer, None, options) == advise(there, answer, None, options)


def test_nothing_is_divided_without_experts_or_other_devices():
    for model, cluster in (("llama-3.1-8b", "4xA100-80GB"), ("mixtral-8x7b", "1xB300-SXM")):
        setting = find_setting(model, cluster, "64/16", "roofline")
        assert with_divisions(setting) is setting and divided(setting) == [setting]


def test_what_was_searched_is_said_and_the_accuracy_of_the_answers_division():
    setting = setting_of("qwen3-235b-a22b", "8xH200-SXM")
    (text,) = [text for text in setting.assumptions if text.startswith("experts: ")]
    assert "a part of each on every device, whole ones (EP), groups of 2, 4, 8 devices" in text
    shared = divided(setting)[-1]
    assert shared.model.attention_dp == 8 and any("attention data parallelism over 8" in t for t in shared.assumptions)
    assert len(shared.assumptions) == len(setting.assumptions)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_no_division_alone_sustains_more():
    setting = setting_of("mixtral-8x7b", "4xA100-80GB")
    arrivals, bounds = Arrivals.poisson(setting.workload, 4096, count=4000), RateBounds(10.0, 1.0, None)
    search = SearchOptions(ALL_REQUESTS, bounds.ttft_s, None, ("chunked", "orca"), "bnb", 0.0)
    (found,) = search_at_rates(setting, arrivals, bounds, (4.0,), search, False)
    alone = [search_at_rates(one, arrivals, bounds, (4.0,), search, False)[0] for one in divided(setting)]
    assert found.highest_rate_seq_s == pytest.approx(max(one.highest_rate_seq_s for one in alone), rel=0.01)
    for policy, best in found.sustained.items():
        each = [one.sustained[policy].goodput_seq_s for one in alone if policy in one.sustained]
        assert best.goodput_seq_s >= 0.93 * max(each)  # policies far behind the best are not refined
