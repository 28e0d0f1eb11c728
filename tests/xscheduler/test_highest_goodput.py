"""The schedule that a server follows: within its bound, or, at best effort, within the lowest that one keeps."""

from dataclasses import replace

import pytest

from xcore.errors import Infeasible
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.workload import RequestLengths, Workload
from xcore.traces.prompt_identity import PromptIdentity
from xprofiler.roofline import roofline_profile
from xscheduler.highest_goodput import LOOSER, MARGIN, highest_goodput, nearest_goodput
from xscheduler.open_tune import Rated
from xscheduler.settings import Setting
from xscheduler.tuned import Search, Tuned

MODEL, CLUSTER = builtin_model("opt-1.3b"), parse_cluster("1xA100-80GB")
SETTING = Setting(MODEL, CLUSTER, Workload.fixed(128, 64), roofline_profile(MODEL, CLUSTER), "fp16", ())
ORCA = ("orca",)


@pytest.fixture(scope="module")
def lowest_s():
    """What is named as the lowest bound that can be kept."""
    with pytest.raises(Infeasible) as refused:
        highest_goodput(SETTING, 0.01, ORCA)
    return refused.value.lowest_latency_s


@pytest.mark.parametrize(
    ("policies", "grows", "admission"),
    [(ORCA, False, "reserve"), (ORCA, True, "grow"), (("rra", "orca"), True, "reserve")],
)
def test_a_server_that_grows_is_searched_with_it_where_all_its_policies_are(monkeypatch, policies, grows, admission):
    asked = []

    def tune_at(*_, **how):
        asked.append(how["admission"])
        raise Infeasible("nothing is searched", None)

    monkeypatch.setattr("xscheduler.open_tune.tune_at", tune_at)
    for search in (highest_goodput, nearest_goodput):
        with pytest.raises(Infeasible):
            search(SETTING, 5.0, policies, grows=grows)
    assert asked == [(admission,)] * 2


def test_the_lowest_bound_that_is_named_has_room_for_the_margin(lowest_s):
    assert highest_goodput(SETTING, 1.05 * lowest_s, ORCA).goodput_seq_s > 0
    for share in (1 - MARGIN / 2, 1 - 2 * MARGIN):
        with pytest.raises(Infeasible, match="the lowest reachable latency is") as refused:
            highest_goodput(SETTING, share * lowest_s, ORCA)
        assert refused.value.lowest_latency_s == lowest_s


@pytest.mark.slow
def test_best_effort_takes_the_nearest_bound(lowest_s):
    found, kept_s = nearest_goodput(SETTING, 0.01, ORCA)
    assert lowest_s <= kept_s <= LOOSER**2 * lowest_s
    assert found.goodput_seq_s == highest_goodput(SETTING, kept_s, ORCA).goodput_seq_s
    feasible, same_s = nearest_goodput(SETTING, 4 * lowest_s, ORCA)
    assert same_s == 4 * lowest_s and feasible.goodput_seq_s > found.goodput_seq_s


def alike(count):
    """A workload of prompts with the same 496 tokens, and 16 tokens of their own."""
    identities = [PromptIdentity(block_ids=(*range(31), 100 + n), block_tokens=16) for n in range(count)]
    return Workload.from_requests("alike", [RequestLengths(512, 32, identity=identity) for identity in identities])


def test_a_trace_that_says_which_prompts_begin_alike_is_searched_with_prefix_caching(monkeypatch):
    """The policies that can't cache are searched without; and all are where the trace says nothing, or it is off."""
    shared, asked = replace(SETTING, workload=alike(40)), []

    def tune_at(*_, policies, prefix_caching, **how):
        asked.append((policies, prefix_caching))
        nothing = Tuned(None, None, (), Search("bnb", 0, 0, 0.0), None, ())
        return Rated(nothing, 1.0, {})

    monkeypatch.setattr("xscheduler.open_tune.tune_at", tune_at)
    for setting, caches in ((shared, True), (shared, False), (SETTING, True)):
        with pytest.raises(Infeasible):
            highest_goodput(setting, 5.0, ("rra", "orca"), caches=caches)
    assert asked == [(ORCA, True), (("rra",), False), *[(("rra", "orca"), False)] * 2]


@pytest.mark.slow
def test_shared_prefixes_raise_the_goodput():
    setting = replace(SETTING, workload=alike(200))
    plain, caching = (highest_goodput(setting, 2.0, ORCA, grows=True, caches=caches) for caches in (False, True))
    assert caching.schedule.prefix_caching and not plain.schedule.prefix_caching
    assert caching.goodput_seq_s > 1.3 * plain.goodput_seq_s
