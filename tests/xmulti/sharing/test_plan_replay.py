"""A plan's models alone: the quick replay beside the one that follows every request."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.xmulti.sharing.test_iteration_cost import tables
from tests.xsimulator.replay.test_event_simulator import MODEL, PROFILE, REQUESTS, plans, schedule, stages_of
from xcore.batching.shared_pool import least_quota
from xcore.errors import InputError
from xcore.policies.priority_sharing import PrioritySharing
from xcore.policies.sharing import SpatialSharing, TimeSharing
from xcore.specs.cluster import parse_cluster
from xcore.specs.cluster_plan import PlannedModel, Share
from xcore.specs.iteration_profile import IterationProfile
from xcore.specs.model import BYTES
from xcore.specs.profile import Table
from xcore.specs.request_times import summarise
from xcore.specs.workload import RequestLengths
from xmulti.sharing.iteration_cost import TableCost
from xmulti.sharing.plan_replay import replay_alone, replay_models
from xmulti.sharing.unit_loads import _cost, loads_of, overhead_of, rule_of
from xsimulator.replay.event_simulator import replay

MEASURED = IterationProfile(1, "m", "d", (tables(1.0, 1.0, 0.1),))


@settings(max_examples=100)
@given(plans(), REQUESTS, st.booleans())
def test_every_request_has_the_replays_times(plan, requests, grows):
    schedule, profile = plan
    if grows and schedule.policy == "orca":
        schedule = replace(schedule, admission="grow")
    requests = sorted(requests, key=lambda r: r.arrival_s)
    expected = replay(schedule, profile, requests, timeline=False).served
    found = replay_alone(schedule, profile, requests)
    rows = sorted(zip(found.finish_s, found.first_token_s, found.start_s, found.arrival_s, strict=True))
    wanted = sorted((s.finish_s, s.first_token_s, s.start_s, s.arrival_s) for s in expected)
    assert len(rows) == len(requests) == len(found.output_tokens)
    for row, want in zip(rows, wanted, strict=True):
        assert row == pytest.approx(want, rel=1e-9)
    assert sorted(found.output_tokens) == sorted(r.output for r in requests)


def sharing(name, share):
    made = replace(schedule("orca"), admission="grow", kv_blocks=40)
    return PlannedModel(name, (0,), made, summarise((), 0.0), share=share)


@pytest.mark.parametrize("share", [Share("time"), Share("time", pool="merged"), Share("space", 0.5), Share("priority")])
def test_loads_have_the_plans_shares_and_pools(share):
    models = [sharing(name, share) for name in "ab"]
    requests = [RequestLengths(40, 30), RequestLengths(20, 9)]
    of_a, of_b = loads_of(models, dict.fromkeys("ab", PROFILE), {"a": requests})
    assert of_a.limits.decode_share == of_b.limits.decode_share == share.decode
    assert list(of_a.requests) == requests and not of_b.requests
    known = len(requests) if share.by == "priority" else 0
    assert len(of_a.hints) == known and all(hints.service == "a" for hints in of_a.hints)
    merged = share.pool == "merged"
    assert of_a.pool.total == of_b.pool.total == (80 if merged else 40), "of both models' memory, or its own quota"
    assert of_a.least == of_b.least == (None if merged else least_quota(models[0].schedule))


@pytest.mark.parametrize(
    ("share", "counts"), [(Share("time"), True), (Share("priority", pool="merged"), True), (Share("space", 0.5), False)]
)
def test_what_a_switch_of_model_takes_is_as_measured(share, counts):
    """By the weights that the others read; instead of the published overhead of merged blocks."""
    models = [sharing(name, share) for name in "abc"]
    spec = models[0].schedule.model.spec
    read = spec.vocab * spec.hidden * BYTES["fp32"] + spec.layers * spec.layer_bytes(1, "fp32")
    measured = replace(PROFILE, switch=Table(("bytes",), ((0.0, 4 * read),), (0.0, 8e-3)))
    profiles = {
        "a": measured,
        "b": PROFILE,
        "c": replace(PROFILE, switch=Table(("bytes",), ((0.0, read),), (0.0, 1e-3))),
    }
    switches = [load.switch_s for load in loads_of(models, profiles, {})]
    assert switches == pytest.approx([4e-3, 0.0, 1e-3] if counts else [0.0] * 3)
    published = 1.04 if share.pool == "merged" else 1.0
    assert overhead_of(models, profiles) == published, "one of them doesn't know"
    assert overhead_of(models, dict.fromkeys("abc", measured)) == 1.0
    assert overhead_of(models[:1], {"a": measured}) == 1.0, "one model has nobody to share with"
    slower = dict.fromkeys("ab", measured) | {"c": replace(measured, merged_blocks=1.02)}
    assert overhead_of(models, slower) == 1.02, "the largest that was measured"


def test_the_rule_is_the_shares():
    rules = [
        rule_of(share) for share in (Share("time"), Share("time", pool="merged"), Share("space"), Share("priority"))
    ]
    assert [type(rule) for rule in rules] == [TimeSharing, TimeSharing, SpatialSharing, PrioritySharing]
    assert [rule._in_order for rule in rules[:2]] == [False, True] and rules[3].prompts_first


@pytest.mark.parametrize("pool", ["quotas", "merged"])
def test_one_of_a_units_models_can_be_replayed_by_itself(pool):
    """As on devices of its own: the other one asks for nothing."""
    requests = {"a": [RequestLengths(40, 30) for _ in range(5)]}
    model = sharing("a", Share("time", pool=pool))
    found = replay_models([model], {"a": PROFILE}, requests)["a"].served
    assert sorted(s.index for s in found) == [*range(5)] and all(s.output_tokens == 30 for s in found)
    again = replay_models([model, sharing("b", model.share)], dict.fromkeys("ab", PROFILE), requests | {"b": []})["a"]
    longer = 1.04 if pool == "merged" else 1.0
    assert max(s.finish_s for s in again.served) == pytest.approx(longer * max(s.finish_s for s in found), rel=0.02)


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [({}, True), ({"replicas": 2}, False), ({"stages": stages_of(MODEL, "both", 0, 2)}, False)],
)
def test_measured_iterations_are_of_one_group_of_devices(changes, allowed):
    made = replace(schedule("orca"), cluster=parse_cluster("2xA40"), **changes)
    if allowed:
        assert isinstance(_cost(made, MEASURED), TableCost)
        return
    with pytest.raises(InputError, match="replay it with a profile of layers"):
        _cost(made, MEASURED)
