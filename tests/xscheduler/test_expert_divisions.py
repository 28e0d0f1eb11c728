"""The divisions of experts that a search tries: its answer is the best of searching each alone."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.xcore.small_specs import schedule
from xcore.specs.bound import ALL_REQUESTS
from xcore.specs.estimate import Estimate
from xscheduler.agent_search import AgentsTuned, best_of
from xscheduler.expert_divisions import divided, divided_as, with_divisions
from xscheduler.goodput import RateBounds
from xscheduler.hourly_replicas import _fewest
from xscheduler.list_meter import Played
from xscheduler.rate_sample import Arrivals
from xscheduler.search import Search, search
from xscheduler.setting_at_rates import search_at_rates
from xscheduler.setting_search import SearchOptions, advise, search_schedule
from xscheduler.settings import find_setting
from xscheduler.tuned import Alternative, Tuned
from xsimulator import estimate

ESTIMATE = Estimate(10.0, 100.0, 1.5, 1.0, 1.5, 0.2, 0.05, 0.5, 0.1)
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
    options = SearchOptions(ALL_REQUESTS, None, None, ("chunked",), "bnb", 0.0, fixed={"max_num_batched_tokens": 512})
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
    options = SearchOptions(ALL_REQUESTS, bounds.ttft_s, None, ("chunked", "orca"), "bnb", 0.0)
    (found,) = search_at_rates(setting, arrivals, bounds, (4.0,), options, False)
    alone = [search_at_rates(one, arrivals, bounds, (4.0,), options, False)[0] for one in divided(setting)]
    assert found.highest_rate_seq_s == pytest.approx(max(one.highest_rate_seq_s for one in alone), rel=0.01)
    for policy, best in found.sustained.items():
        each = [one.sustained[policy].goodput_seq_s for one in alone if policy in one.sustained]
        assert best.goodput_seq_s >= 0.93 * max(each)  # policies far behind the best are not refined


def test_hours_have_whole_groups_of_replicas_that_share_experts():
    shared = next(one for one in divided(setting_of("mixtral-8x7b", "4xH200-SXM")) if one.model.attention_dp == 2)
    schedule = search_schedule(shared, None, policies=("orca",)).schedule
    tried = []
    meter = SimpleNamespace(sustains=lambda at, rate, count: tried.append(at.replicas))
    assert schedule.replicas == 4 and _fewest(meter, schedule, 1.0, 1.5) == 4 and tried == [2]


def test_a_search_of_no_spaces_finds_nothing():
    for method in ("bnb", "optuna", "exhaustive"):
        result = search([], method)
        assert result.space is None and result.throughput == 0.0


def test_agents_get_each_policys_best_of_several_searches():
    def answer(orca, rra, excess=0.0):
        made = schedule("orca")
        others = [
            Alternative(
                policy, rate and made, rate and replace(ESTIMATE, throughput_seq_s=rate), "late" if not rate else ""
            )
            for policy, rate in (("orca", orca), ("rra", rra))
        ]
        best = max(others, key=lambda other: other.estimate.throughput_seq_s if other.estimate else 0.0)
        tuned = Tuned(best.schedule, best.estimate, tuple(others), Search("racing", 1, 2, 0.5, 3), None, ())
        shares = {other.policy: other.estimate.throughput_seq_s for other in others if other.estimate}
        return AgentsTuned(tuned, 9, shares, made, Played(excess, 1.0, 1.0))

    found = best_of([answer(2.0, 1.0), answer(3.0, None), answer(1.0, 1.5)])
    assert found.cached_shares == {"orca": 3.0, "rra": 1.5} and found.rate_seq_s == 3.0
    assert [other.reason for other in found.tuned.alternatives] == [
        "has the highest turn throughput, or as high as any other policy",
        "has 50% fewer turns per second than the best policy",
    ]
    assert (found.tuned.search.evaluations, found.tuned.search.replays) == (3, 9)
    late = [answer(None, None, excess) for excess in (0.3, 0.1, 0.2)]
    assert best_of(late).played == late[1].played
