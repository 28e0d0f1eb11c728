"""How many devices of which kind sustain a rate: bounds against searches, answers against exhaustive replays."""

import itertools
from dataclasses import replace

import pytest

from xcore.specs.bound import ALL_REQUESTS
from xcore.specs.cluster import parse_cluster
from xcore.specs.deployment import Deployment
from xscheduler.device_search import ABOVE, cheapest, options_of
from xscheduler.drafts import Drafts
from xscheduler.expert_divisions import divided, with_divisions
from xscheduler.goodput import Meter, RateBounds
from xscheduler.open_searches import searches_at
from xscheduler.rate_sample import Arrivals
from xscheduler.replica_layout import DevicesNeeded, RateQuestion, ReplicaLayout, larger_layouts, least, replica_layouts
from xscheduler.replicas_needed import needed_by, needed_drafting
from xscheduler.setting_search import SearchOptions
from xscheduler.settings import find_setting
from xscheduler.tune import tune

KINDS = ("A40", "A100-80GB", "L40S", "H100-SXM")
SEARCH = SearchOptions(ALL_REQUESTS, None, None, ("chunked",), "bnb", 0.0)
BATCHES, BUDGETS = (16, 32, 64, 128, 256), (256, 512, 1024, 2048)
"""The grid of the exhaustive replays."""


@pytest.fixture(scope="module")
def settings():
    return [find_setting("opt-13b", f"8x{kind}", "512/32", "roofline", one_engine=True) for kind in KINDS]


@pytest.fixture(scope="module")
def asked(settings):
    """A question with few requests, so that all searches and replays see the same ones."""
    workload, longest = settings[0].workload, settings[0].model.longest_request
    arrivals = Arrivals.poisson(workload, longest, count=4000)
    return RateQuestion(40.0, RateBounds(3.0), SEARCH, arrivals)


def exhaustive(layout: ReplicaLayout, asked: RateQuestion, most: int) -> int | None:
    """Return the fewest replicas on which any schedule of the grid sustains the rate, each replayed."""
    setting = layout.setting
    for replicas in range(1, most + 1):
        cluster = replace(layout.cluster(replicas), nodes=replicas, devices_per_node=layout.devices)
        for batch, budget in itertools.product(BATCHES, BUDGETS):
            if batch > budget:
                continue
            fixed = layout.fixed(replicas) | {"max_num_seqs": batch, "max_num_batched_tokens": budget}
            ((search,),) = searches_at(
                setting.model,
                Deployment(cluster, setting.profile),
                setting.workload,
                asked.arrivals,
                asked.bounds,
                bound=ALL_REQUESTS,
                policies=("chunked",),
                kv_dtype=setting.kv_dtype,
                fixed=fixed,
                own=None,
                admission=("reserve",),
                prefix_caching=False,
            ).values()
            for space in search.members:
                stages = space.where.replica.decode.stages
                whole = layout.shared * sum(stage.tp for stage in stages) == layout.devices
                if whole and search._fits(space, (0, 0)):
                    schedule = search.schedule(space, (0, 0))
                    if Meter(setting.profile, asked.arrivals, asked.bounds).sustains(schedule, asked.rate_seq_s):
                        return replicas
    return None


def test_no_replica_exceeds_its_fluid_rate_by_more_than_the_factor(settings, asked):
    close = 0
    for setting in settings:
        for option in options_of(replica_layouts(setting, {}), asked):
            layout = option.layout
            steady = tune(
                setting.model,
                layout.cluster(1),
                setting.workload,
                setting.profile,
                latency_bound_s=3.0,
                policies=("chunked",),
                kv_dtype=setting.kv_dtype,
                fixed=layout.fixed(1) | {"max_num_batched_tokens": 512},
                floor=0.0,
            )
            assert steady.estimate and steady.estimate.throughput_seq_s <= option.most, (layout.kind, layout.name)
            close += layout.pp == 1 and steady.estimate.throughput_seq_s > 0.85 * option.most / ABOVE
    assert close >= 8  # the bound is tight where there is no pipeline


@pytest.mark.parametrize("kind", KINDS[::3])
def test_replicas_are_those_of_exhaustive_replays(settings, asked, kind):
    setting = settings[KINDS.index(kind)]
    for option in options_of(replica_layouts(setting, {"tp_degree": 2})[:1], asked):
        needed = needed_by(option.layout, option.most, asked)
        expected = exhaustive(option.layout, asked, 12)
        assert (
            isinstance(needed, DevicesNeeded) and expected and needed.replicas in (expected - 1, expected)
        )  # the search has a finer grid
        assert needed.goodput_seq_s >= asked.rate_seq_s
        meter = Meter(setting.profile, asked.arrivals, asked.bounds)
        assert meter.sustains(needed.schedule, asked.rate_seq_s)


def test_other_policies_have_a_bound_that_their_search_does_not_exceed(settings, asked):
    """RRA prefills and decodes in turns, so that the fluid rate isn't a bound for it."""
    rra = replace(asked, search=replace(SEARCH, policies=("rra",)), rate_seq_s=20.0)
    options = options_of([layout for s in settings[1::2] for layout in replica_layouts(s, {"tp_degree": 1})[:1]], rra)
    (best,), _ = cheapest(options, rra, 1)
    each = {o.layout: o.most for o in options}[best.layout]
    assert best.schedule.policy == "rra" and best.goodput_seq_s <= each * best.replicas
    assert best.replicas >= least(20.0, each)


@pytest.mark.parametrize("acceptance", ["0.9,0.5,0.1", pytest.param("0.8", marks=pytest.mark.slow)])
def test_the_number_of_draft_tokens_is_the_one_that_needs_the_fewest_replicas(settings, asked, acceptance):
    drafts = replace(Drafts.of(acceptance, None, None, None), lengths=(0, 1, 2))
    drafting = replace(asked, drafts=drafts, rate_seq_s=25.0)
    (option,) = options_of(replica_layouts(settings[0], {"tp_degree": 1})[:1], drafting)
    needed = needed_drafting(option.layout, option.most, drafting, lambda replicas: False)
    each = {n: needed_by(option.layout.drafting(drafts.at(n)), option.most, drafting) for n in drafts.lengths}
    assert needed.replicas == min(one.replicas for one in each.values()) < each[0].replicas
    assert needed.schedule.speculation.drafted == needed.layout.drafted > 0
    (best,), _ = cheapest([option], drafting, 1)
    assert best.replicas == needed.replicas


@pytest.fixture(scope="module")
def measured(settings, asked):
    """Layouts of two kinds on up to two devices, with the replicas of each."""
    layouts = [layout for s in settings[1::2] for layout in replica_layouts(s, {}) if layout.devices <= 2]
    options = options_of(layouts, asked)
    needed = [needed_by(o.layout, o.most, asked) for o in options]
    return options, [one for one in needed if isinstance(one, DevicesNeeded)]


def test_too_many_replicas_are_given_up_with_the_number_that_is_needed_at_least(settings, asked):
    (option,) = options_of(replica_layouts(settings[0], {"tp_degree": 2})[:1], asked)
    needed = needed_by(option.layout, option.most, asked)
    assert isinstance(needed, DevicesNeeded)
    most = needed.replicas - 2
    least_of_all = needed_by(option.layout, option.most, asked, hopeless=lambda replicas: replicas > most)
    assert isinstance(least_of_all, int) and most < least_of_all <= needed.replicas


@pytest.mark.parametrize("prices", [None, {"A100-80GB": 1.0, "H100-SXM": 2.5}])
def test_the_cheapest_layouts_are_those_of_measuring_all(measured, asked, prices):
    options, all_needed = measured
    asked = replace(asked, prices=prices)
    best, others = cheapest(options, asked, 2)
    expected = sorted(all_needed, key=lambda n: asked.order(n.layout, n.replicas))[:2]
    assert [(n.layout, n.replicas) for n in best] == [(n.layout, n.replicas) for n in expected]
    assert [n.price_hour for n in best] == [prices and prices[n.layout.kind] * n.devices for n in best]
    assert best[0].layout.kind == ("A100-80GB" if prices else "H100-SXM")
    for option in others:  # the rest can't be better than the last answer
        assert option.order(asked) >= asked.order(best[-1].layout, best[-1].replicas)


def test_a_layout_makes_clusters_without_idle_devices(settings):
    for layout in (*replica_layouts(settings[0], {}), *larger_layouts(settings[0], {})):
        for replicas in (1, 2, 3, 7, 8, 12, 24):
            cluster = layout.cluster(replicas)
            assert cluster.devices == replicas * layout.devices
            assert cluster.devices_per_node % min(layout.devices, 8) == 0 and cluster.devices_per_node <= 8
            named = parse_cluster(cluster.name)
            assert (named.nodes, named.devices_per_node) == (cluster.nodes, cluster.devices_per_node)


def test_the_fewest_replicas_are_rounded_up():
    assert [least(10.0, 5.0), least(10.0, 4.9), least(0.1, 5.0), least(3 * 0.1, 0.1)] == [2, 3, 1, 3]


def test_replicas_that_share_experts_are_counted_in_groups(asked):
    """The rate of a group keeps its bound, and the answer has whole groups, no more than exhaustive replays need."""
    setting = with_divisions(find_setting("mixtral-8x7b", "8xH100-SXM", "512/32", "roofline", one_engine=True))
    pair = next(one for one in divided(setting) if one.model.attention_dp == 4)
    arrivals = Arrivals.poisson(setting.workload, setting.model.longest_request, count=2000)
    question = replace(asked, arrivals=arrivals, rate_seq_s=90.0)
    (option,) = options_of(replica_layouts(pair, {}), question)
    assert (option.layout.name, option.layout.devices, option.layout.shared) == ("TP1, attention DP4", 4, 4)
    needed = needed_by(option.layout, option.most, question)
    assert needed.replicas == exhaustive(option.layout, question, 4)
    assert needed.schedule.replicas == 4 * needed.replicas == needed.cluster.devices == needed.devices
    assert option.most >= needed.goodput_seq_s / needed.replicas
    assert Meter(pair.profile, arrivals, question.bounds).sustains(needed.schedule, 90.0)
