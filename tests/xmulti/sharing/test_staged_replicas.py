"""Replicas in a plan's placement, beside all placements that there are."""

import itertools

import pytest

from tests.xmulti.sharing.test_shared_devices import demands_of
from xcore.specs.cluster import parse_cluster
from xmulti.plans import plan_evaluation
from xmulti.plans.planning import make_plan
from xmulti.sharing.staged_placement import Groups, place_in_groups
from xmulti.stages.two_stage import MOST, Service, ServiceGroup, partition, summary

CLUSTER = parse_cluster("3xA40")
HOT = {"name": "hot", "model": "opt-6.7b", "workload": "256/16", "rate": "40/s", "latency_bound": "3s"}
RARE = {"name": "rare", "model": "opt-6.7b", "workload": "256/16", "rate": "2/s", "latency_bound": "3s"}


@pytest.fixture(autouse=True)
def few_requests(monkeypatch):
    monkeypatch.setattr(plan_evaluation, "REQUESTS", 60)
    monkeypatch.setattr(plan_evaluation, "LEAST", 20)


def every(groups, demands, most_replicas):
    """All placements in which each model is in one to `most_replicas` groups."""
    services = [Service(demand.name, demand.rate_seq_s, 1) for demand in demands]
    names = [demand.name for demand in demands]
    subsets = [subset for count in range(MOST + 1) for subset in itertools.combinations(names, count)]
    for tp in (1, 2):
        empty = partition(services, 1, CLUSTER.devices, tp, groups.have_room) or ()
        for chosen in itertools.product(subsets, repeat=len(empty)):
            counts = [sum(name in subset for subset in chosen) for name in names]
            if min(counts) >= 1 and max(counts) <= most_replicas:
                yield tuple(ServiceGroup(each.devices, subset) for each, subset in zip(empty, chosen, strict=True))


@pytest.mark.parametrize(("rate", "gains"), [("40/s", True), ("5/s", False)])
def test_placements_with_replicas_are_near_the_best_of_all(tmp_path, rate, gains):
    """By the same replays: at most a twentieth of the requests more are late."""
    demands = demands_of(tmp_path, HOT | {"rate": rate}, RARE, cluster=CLUSTER.name)
    groups = Groups(demands, CLUSTER, "priority")

    def best_of(most):
        found = (summary(0, placed, groups.outcomes(placed)) for placed in every(groups, demands, most))
        return min(found, key=lambda placed: placed.order)

    def of(models):
        names = {}
        for model in models:
            names.setdefault(model.devices, []).append(model.name)
        return tuple(ServiceGroup(devices, tuple(sorted(inside))) for devices, inside in names.items())

    alone, *better = place_in_groups(demands, CLUSTER, "priority", lambda done, total: None)
    found = [summary(0, of(models), groups.outcomes(of(models))) for models in (alone, *better)]
    assert found[0].in_time >= best_of(1).in_time - 0.05
    assert found[-1].in_time >= best_of(CLUSTER.devices).in_time - 0.05
    assert found[-1].order <= found[0].order and (found[-1].in_time > found[0].in_time + 0.2) == gains
    limited = place_in_groups(demands, CLUSTER, "priority", lambda done, total: None, most_replicas=1)
    assert limited == [alone]


def test_a_plan_has_replicas_where_they_raise_what_it_serves(tmp_path):
    demands = demands_of(tmp_path, HOT | {"rate": "20/s"}, RARE, cluster=CLUSTER.name)
    single, plan = (make_plan(demands, CLUSTER, "seallm", most) for most in (1, None))
    assert plan.headroom > 1.5 * single.headroom
    assert len(plan.replicas["hot"]) == 2 and len(plan.replicas["rare"]) == 1
    assert {replica.goodput_seq_s for replica in plan.replicas["hot"]} == {20 * plan.headroom}
