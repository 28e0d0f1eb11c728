"""SeaLLM's placement: groups, the greedy allocation beside all allocations, and what Algorithm 1 leaves open."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xmulti.stages.two_stage import (
    MOST,
    Service,
    ServiceGroup,
    ServiceOutcome,
    _has_room,
    partition,
    place_in_stages,
    placements,
    summary,
)


class Queues:
    """A scorer in closed form: each group a queue whose load is what its services ask of it; a service's requests are
    dealt out evenly over its groups.
    """

    def __init__(self, services, work):
        self.services, self.work = {s.name: s for s in services}, work
        self.calls = []

    def __call__(self, groups):
        self.calls.append(groups)
        names = {name for group in groups for name in group.services}
        count = {name: sum(name in group.services for group in groups) for name in names}
        latency = dict.fromkeys(names, 0.0)
        for group in groups:
            load = sum(self.services[n].rate_seq_s * self.work[n] / count[n] for n in group.services)
            load /= len(group.devices) ** 0.8
            for name in group.services:
                latency[name] += (1.0 if load >= 1 else min(1.0, 0.05 / (1 - load))) * 10 / count[name]
        return {
            n: ServiceOutcome(
                round(self.services[n].requests * min(1.0, latency[n] / 10)), latency[n], self.services[n].requests
            )
            for n in names
        }


def case(seed, count):
    draws = np.random.default_rng(seed)
    names = [f"s{place}" for place in range(count)]
    services = [Service(name, float(draws.uniform(0.1, 2)), int(draws.integers(10, 100))) for name in names]
    work = {name: float(draws.uniform(0.05, 0.6)) for name in names}
    size = {name: int(draws.choice([2, 3, 9] if name == "s0" else [2, 3])) for name in names}
    return services, work, lambda devices, inside: sum(size[name] for name in inside) <= 6 * devices


def check(placed, services, fits):
    groups = placed.groups
    assert {name for group in groups for name in group.services} == {s.name for s in services}
    for group in groups:
        assert len(group.services) <= MOST and len(set(group.services)) == len(group.services)
        assert fits(len(group.devices), group.services)
    devices = [device for group in groups for device in group.devices]
    assert sorted(devices) == list(range(len(devices)))


@pytest.mark.parametrize("most", [None, 1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_greedy_is_near_the_best_of_all_allocations(seed, most):
    services, work, fits = case(seed, 3)
    score = Queues(services, work)
    placed = place_in_stages(services, 1, 4, fits, score, most)
    check(placed, services, fits)
    best = max(
        (summary(tp, groups, score(groups)) for tp in (1, 2, 4) for groups in every(services, tp, fits, most)),
        key=lambda entry: entry.in_time,
    )
    assert best.in_time - 0.15 <= placed.in_time <= best.in_time + 1e-9
    assert placed.in_time == pytest.approx(summary(0, placed.groups, score(placed.groups)).in_time)


def every(services, tp, fits, most):
    """All allocations to the groups of a degree, by brute force."""
    groups = partition(services, 1, 4, tp, fits)
    names = [service.name for service in services]
    subsets = [subset for k in range(MOST + 1) for subset in itertools.combinations(names, k)]
    for chosen in itertools.product(subsets, repeat=len(groups or ())):
        where = [name for subset in chosen for name in subset]
        if set(where) != set(names) or (most and max(map(where.count, names)) > most):
            continue
        if all(not s or fits(len(g.devices), s) for g, s in zip(groups, chosen, strict=True)):
            yield tuple(ServiceGroup(g.devices, s) for g, s in zip(groups, chosen, strict=True))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 6))
def test_whatever_is_placed_is_whole_and_none_is_missing_where_there_is_room(seed, count):
    services, work, fits = case(seed, count)
    placed = place_in_stages(services, 2, 4, fits, Queues(services, work))
    assert placed is not None  # six services, each with room on half a node, on two nodes of four
    check(placed, services, fits)


def test_no_group_takes_another_at_the_end_unless_replicas_are_out():
    services, work, fits = case(1, 3)
    placed = place_in_stages(services, 1, 4, fits, Queues(services, work))
    for group in placed.groups:
        for service in services:
            full = len(group.services) == MOST or service.name in group.services
            assert full or not fits(len(group.devices), (*group.services, service.name))
    single = place_in_stages(services, 1, 4, fits, Queues(services, work), most_replicas=1)
    assert sum(len(group.services) for group in single.groups) == len(services)


def test_services_without_a_group_go_first_the_one_with_most_requests_before_the_others(monkeypatch):
    services = [Service("busy", 5.0, 90), Service("idle", 0.1, 10), Service("middle", 1.0, 40)]
    score = Queues(services, {"busy": 0.5, "idle": 0.1, "middle": 0.1})
    order, add = [], ServiceGroup.with_service
    monkeypatch.setattr(ServiceGroup, "with_service", lambda group, name: order.append(name) or add(group, name))
    place_in_stages(services, 1, 4, lambda devices, inside: devices == 1, score)
    assert order[:3] == ["busy", "middle", "idle"]
    first = score.calls[0]
    assert sorted(name for group in first for name in group.services) == ["busy", "idle", "middle"]


def test_then_the_most_unserved_service_goes_to_the_group_with_the_lowest_rate():
    services = [Service("late", 1.0, 50), Service("well", 3.0, 50)]

    def score(groups):
        return {n: ServiceOutcome(30 if n == "late" else 0, 1.0, 50) for group in groups for n in group.services}

    placed = place_in_stages(services, 1, 2, lambda devices, inside: devices == 1, score)
    assert [group.services for group in placed.groups] == [("late", "well"), ("late", "well")]
    three = place_in_stages(services, 1, 4, lambda devices, inside: devices == 1, score)
    assert sum("late" in group.services for group in three.groups) == 4


def test_equal_shares_in_time_are_settled_by_latency():
    services = [Service("s", 1.0, 10)]

    def score(groups):
        return {"s": ServiceOutcome(0, float(len(groups)), 10)}

    assert place_in_stages(services, 1, 4, lambda devices, inside: True, score).tp == 4


@pytest.mark.parametrize(
    ("latencies", "ends"), [((5, 4, 3, 3, 3, 2.99, 1), 6), ((5, 4, 3, 3, 3, 2, 1), 10), ((5, 5, 5, 5, 1), 4)]
)
def test_a_search_gives_up_after_three_replicas_that_change_little(latencies, ends):
    services = [Service(f"s{i}", 1.0, 10) for i in range(4)]

    def score(groups):
        replicas = sum(len(group.services) for group in groups) - len(services)
        return {s.name: ServiceOutcome(0, latencies[min(replicas, len(latencies) - 1)], 10) for s in services}

    asked = (services, 1, 8, lambda devices, inside: devices == 1, score, None, lambda done, of: None)
    (whole,), (given_up,) = placements(*asked, gives_up=False), placements(*asked)
    assert len(whole) == 8 * MOST - len(services) + 1 and given_up == whole[:ends]


def test_neighbours_are_merged_until_the_largest_fits():
    services = [Service("small", 1.0, 10), Service("large", 1.0, 10)]
    needs = {"small": 1, "large": 4}
    fits = lambda devices, inside: all(needs[n] <= devices for n in inside) and len(inside) < 2  # noqa: E731
    sizes = [len(group.devices) for group in partition(services, 1, 8, 1, fits)]
    assert sizes == [4, 1, 1, 1, 1]
    assert [group.devices for group in partition(services, 1, 8, 4, fits)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert partition(services, 2, 2, 1, fits) is None
    assert place_in_stages(services, 2, 2, fits, lambda groups: {}) is None


def test_services_that_need_most_find_room_first():
    """One that needs a whole group, after two that could have taken half of each."""
    services = [Service(name, 1.0, 10) for name in ("half", "other", "whole")]

    def fits(size, names):
        return sum(2 if name == "whole" else 1 for name in names) <= size

    assert _has_room(services, [2, 2], fits) and not _has_room(services, [2, 1], fits)


def test_a_placement_is_summed_up_over_all_requests():
    outcomes = {"a": ServiceOutcome(10, 2.0, 30), "b": ServiceOutcome(0, 5.0, 10)}
    placed = summary(2, (), outcomes)
    assert (placed.in_time, placed.normalised, placed.order) == (0.75, 2.75, (-0.75, 2.75))
