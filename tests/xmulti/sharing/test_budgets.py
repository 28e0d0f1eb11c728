"""Budgets of dedicated devices: the best of all, by brute force; every device is given once, and never across nodes."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xmulti.sharing.budgets import Budget, Level, Unsearched, _near, best_budgets, counts, place, rising


def some_frontier(random, most):
    """Of a model with a rate, or of one with requests, which some counts of devices don't do at all."""
    online, least = random.random() < 0.6, random.randint(1, max(1, most // 2))
    budgets, reached = [], random.uniform(0.2, 1.0)
    for devices in range(1, most + 1):
        reached *= random.choice([0.9, 1.0, 1.1, 1.5])
        fits = devices >= least
        headroom = (reached if fits else 0.0) if online else math.inf
        budgets.append(Budget(devices, headroom, 0.0 if online else 10 / reached if fits else math.inf))
    return rising(budgets)


def score(budgets):
    """What is compared, in this order; fewer devices are better where all else is equal."""
    seconds, headroom = max(b.seconds for b in budgets), min(b.headroom for b in budgets)
    return min(1.0, headroom), -seconds, headroom, -sum(b.devices for b in budgets)


def exhaustive(frontiers, nodes, devices_per_node):
    choices = (
        budgets
        for budgets in itertools.product(*frontiers)
        if place([b.devices for b in budgets], nodes, devices_per_node) and max(b.seconds for b in budgets) < math.inf
    )
    return max(choices, key=score, default=None)


@pytest.mark.parametrize("seed", range(200))
def test_they_are_the_best_of_all(seed):
    drawn = random.Random(seed)
    nodes, most = drawn.choice([(1, 4), (1, 8), (2, 4)])
    frontiers = [some_frontier(drawn, most) for _ in range(drawn.randint(1, 4))]
    want, found = exhaustive(frontiers, nodes, most), best_budgets(frontiers, nodes, most)
    assert (found is None) == (want is None)
    if found and want:
        assert score(found.budgets) == score(want)
        assert (found.level.headroom, found.level.seconds) == (score(want)[2], -score(want)[1])


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 4), st.integers(1, 8), st.data())
def test_every_device_is_given_once_and_no_small_budget_is_split(nodes, most, data):
    sizes = data.draw(st.lists(st.sampled_from(counts(nodes, most)), min_size=1, max_size=6))
    placed = place(sizes, nodes, most)
    if placed is None:
        assert not fits(sizes, nodes, most)
        return
    assert [len(devices) for devices in placed] == sizes
    given_out = list(itertools.chain(*placed))
    assert len(set(given_out)) == len(given_out) and set(given_out) <= set(range(nodes * most))
    for devices in placed:
        assert len({device // most for device in devices}) == -(-len(devices) // most)


def fits(sizes, nodes, most):
    """Whether there is room, by trying every assignment of small budgets to nodes."""
    whole = sum(size // most for size in sizes if size > most)
    small = [size for size in sizes if size <= most]
    return whole <= nodes and any(
        all(sum(s for s, n in zip(small, chosen, strict=True) if n == node) <= most for node in range(nodes - whole))
        for chosen in itertools.product(range(nodes - whole), repeat=len(small))
    )


def test_where_more_devices_do_worse_fewer_are_taken():
    measured = [Budget(1, 0.5), Budget(3, 0.4), Budget(2, 0.9), Budget(4, 0.9), Budget(8, 2.0)]
    assert [b.devices for b in rising(measured)] == [1, 2, 8]


def scaling_frontier(random, nodes, each):
    """Of a model that does no better than in proportion to its devices, and a tenth."""
    online, per_device, budgets = random.random() < 0.6, random.uniform(0.1, 0.5), []
    least = random.choice([1, 1, 2, 4])
    for devices in counts(nodes, each):
        done = per_device * devices if devices >= least else 0.0
        done *= random.uniform(0.95, 1.0)
        budgets.append(
            Budget(devices, done if online else math.inf, 0.0 if online else 10 / done if done else math.inf)
        )
    return budgets


@pytest.mark.parametrize("one_node", [False, True])
@pytest.mark.parametrize("seed", range(200))
def test_frontiers_searched_where_they_decide_give_the_best_budgets(seed, one_node):
    drawn = random.Random(seed)
    nodes, each = drawn.choice([(1, 4), (1, 8), (2, 4), (8, 8)])
    sizes = counts(1, each) if one_node else None
    frontiers = [scaling_frontier(drawn, 1 if one_node else nodes, each) for _ in range(drawn.randint(1, 6))]
    asked = []

    def search(wanted):
        asked.extend(wanted)
        return [next(budget for budget in frontiers[i] if budget.devices == devices) for i, devices in wanted]

    unsearched = Unsearched(len(frontiers), search, nodes, each, sizes)
    found = unsearched.best(lambda done, of: None)
    want = best_budgets([rising(frontier) for frontier in frontiers], nodes, each)
    assert (found is None) == (want is None) and len(set(asked)) == len(asked) == unsearched.searched
    if found and want:
        assert min(1.0, found.level.headroom) == pytest.approx(min(1.0, want.level.headroom), abs=1e-12)
        assert found.level.seconds <= want.level.seconds * 1.03 or want.level.seconds == math.inf
        if found.level.seconds == want.level.seconds:
            assert found.level.headroom >= want.level.headroom * 0.97


def test_few_numbers_of_devices_are_searched():
    drawn = random.Random(5)
    frontiers = [scaling_frontier(drawn, 8, 8) for _ in range(20)]
    by_devices = [{b.devices: b for b in frontier} for frontier in frontiers]
    unsearched = Unsearched(20, lambda wanted: [by_devices[i][devices] for i, devices in wanted], 8, 8)
    told = []
    assert unsearched.best(lambda done, of: told.append((done, of))) is not None
    assert told[0] == (0, 20) and all(of == next_done for (_, of), (next_done, _) in itertools.pairwise(told))
    assert unsearched.searched < 4 * 20 < 20 * len(counts(8, 8)) / 3


def test_the_fewest_devices_that_do_anything_are_found():
    """Half of the rate is something; so are requests that end."""
    frontiers = [
        [Budget(1, 0.0, math.inf), Budget(2, 0.5), Budget(3, 2.0), Budget(4, 2.0)],
        [Budget(1, math.inf, math.inf), Budget(2, math.inf, math.inf), Budget(3, math.inf, 9.0), Budget(4)],
        [Budget(devices, 0.0, math.inf) for devices in range(1, 5)],
    ]
    unsearched = Unsearched(3, lambda wanted: [frontiers[i][devices - 1] for i, devices in wanted], 1, 4)
    assert [unsearched.least(i) for i in range(3)] == [2, 3, None] and unsearched.searched == 2 + 3 + 4


@pytest.mark.parametrize(
    ("headroom", "seconds", "near"),
    [
        (2.0, 100.0, True),
        (1.95, 100.0, True),  # three parts of a hundred less room
        (1.93, 100.0, False),
        (2.0, 102.9, True),  # and as much longer
        (2.0, 103.1, False),
    ],
)
def test_a_level_that_is_worse_by_a_little_is_near(headroom, seconds, near):
    assert _near(Level(headroom, seconds), Level(2.0, 100.0), 0.03) == near


def test_a_rate_that_is_not_met_is_not_near_one_that_is():
    assert not _near(Level(0.99, 0.0), Level(1.0, 0.0), 0.03) and not _near(Level(0.49, 0.0), Level(0.5, 0.0), 0.03)
    assert _near(Level(0.5, 0.0), Level(0.5, 0.0), 0.03)


def test_budgets_are_of_one_node_or_of_whole_ones():
    assert counts(1, 4) == [1, 2, 3, 4] and counts(3, 2) == [1, 2, 4, 6] and counts(2, 1) == [1, 2]
