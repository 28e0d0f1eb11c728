"""Groups of models that share devices: the best of all partitions, by brute force, with few of them measured."""

import itertools
import random
from functools import partial

import pytest

from xmulti.sharing.budgets import place
from xmulti.sharing.groups import STEP, GroupSearch, IdenticalNodes


def partitions(models):
    """All of them, by each model's block."""
    if not models:
        yield []
        return
    first, *rest = models
    for blocks in partitions(rest):
        yield [(first,), *blocks]
        for i, block in enumerate(blocks):
            yield [*blocks[:i], tuple(sorted((first, *block))), *blocks[i + 1 :]]


class Table:
    """Headrooms of all groups on all numbers of devices: a group has none that a part of it has not."""

    def __init__(self, drawn, models, cluster, alone=0.5):
        self.cluster, self.headrooms, self.asked = cluster, {}, []
        work = [drawn.uniform(0.2, 2.0) for _ in range(models)]
        groups = [g for size in range(1, models + 1) for g in itertools.combinations(range(models), size)]
        for group in groups:
            overlap = drawn.uniform(1.0, 1.8) if len(group) > 1 else 1.0
            for devices in cluster.sizes(group):
                headroom = overlap * drawn.uniform(0.8, 1.1) * devices / sum(work[i] for i in group)
                parts = [self.headrooms.get((g, devices)) for g in groups if set(g) < set(group)]
                self.headrooms[group, devices] = min([headroom, *(h for h in parts if h is not None)])
        self.optimism = {part: drawn.choice([1.0, 1.1, 2.0]) for part in self.headrooms}
        self.says_below = drawn.random() < 0.5

    def at_most(self, group, devices):
        return self.headrooms[group, devices] * self.optimism[group, devices]

    def reached(self, parts, level):
        self.asked += parts
        known = [self.headrooms[part] for part in parts]
        return [headroom if headroom >= level or self.says_below else None for headroom in known]

    def best(self, models):
        """By trying all partitions with all numbers of devices."""
        found = 0.0
        for groups in partitions(list(range(models))):
            for numbers in itertools.product(*(self.cluster.sizes(group) for group in groups)):
                if place(numbers, self.cluster.nodes, self.cluster.devices_per_node):
                    parts = zip(groups, numbers, strict=True)
                    found = max(found, min(self.headrooms[part] for part in parts))
        return found


@pytest.mark.parametrize("seed", range(150))
def test_they_are_the_best_of_all_partitions(seed):
    drawn = random.Random(seed)
    nodes = drawn.choice([(1, 1), (1, 2), (1, 4), (2, 2), (2, 2, False)])
    models, cluster = drawn.randint(1, 5), IdenticalNodes(*nodes)
    table = Table(drawn, models, cluster)
    want, floor = table.best(models), drawn.choice([0.0, 0.0, 0.5, 2.0])
    some = drawn.sample(sorted(table.headrooms), len(table.headrooms) // 4)
    seeds = {part: table.headrooms[part] * drawn.choice([1.0, 0.7]) for part in some}
    search = GroupSearch(models, cluster, table, seeds)
    found = search.best(floor, 10_000)
    assert search.complete and len(set(table.asked)) == len(table.asked) == search.measured
    if found is None:
        assert want < floor * (1 + STEP) or want == 0.0
        return
    assert want / (1 + STEP) <= found.headroom <= want and found.headroom >= floor * (1 + STEP)
    assert sorted(model for group, _ in found.parts for model in group) == list(range(models))
    assert [len(devices) for devices in found.devices] == [number for _, number in found.parts]
    taken = list(itertools.chain(*found.devices))
    assert len(set(taken)) == len(taken) and set(taken) <= set(range(cluster.devices))
    on = [{device // cluster.devices_per_node for device in devices} for devices in found.devices]
    assert cluster.spans or {len(nodes) for nodes in on} == {1}


def test_headrooms_of_other_plans_that_are_asked_for_later_change_nothing():
    """Each is asked for once at most, and most of them never."""
    offered = asked = 0
    for seed in range(40):
        drawn = random.Random(seed)
        models, cluster = drawn.randint(2, 4), IdenticalNodes(*drawn.choice([(1, 2), (1, 4), (2, 2)]))
        table, floor = Table(drawn, models, cluster), drawn.choice([0.0, 0.5, 2.0])
        some = drawn.sample(sorted(table.headrooms), len(table.headrooms) // 3)
        seeds = {part: table.headrooms[part] * drawn.choice([1.0, 0.7, 1.3]) for part in some}
        later = drawn.sample(some, len(some) // 2)
        left = {part: seeds[part] for part in later}
        known = {part: headroom for part, headroom in seeds.items() if part not in left}
        lazy = GroupSearch(models, cluster, table, known, {part: partial(left.pop, part) for part in later})
        assert lazy.best(floor, 10_000) == GroupSearch(models, cluster, table, seeds).best(floor, 10_000)
        half = len(table.asked) // 2
        assert table.asked[:half] == table.asked[half:]
        offered, asked = offered + len(later), asked + len(later) - len(left)
    assert 0 < asked < offered / 2


def test_few_groups_are_measured():
    drawn = random.Random(3)
    cluster = IdenticalNodes(1, 4)
    table = Table(drawn, 6, cluster)
    table.optimism = dict.fromkeys(table.headrooms, 1.1)
    search = GroupSearch(6, cluster, table)
    assert search.best(0.0, 10_000) and search.measured < len(table.headrooms) / 4


def test_a_search_that_is_cut_short_says_so():
    table = Table(random.Random(4), 4, IdenticalNodes(1, 4))
    search = GroupSearch(4, IdenticalNodes(1, 4), table)
    assert search.best(0.0, 0) is None and not search.complete and not table.asked


def test_some_share_while_others_have_their_own():
    """Two idle models on one device, a busy one alone: neither all shared nor all dedicated is as good."""

    class Fixed:
        def at_most(self, group, devices):
            load = sum((1.0, 0.1, 0.1)[i] for i in group)
            return devices / load if len(group) == 1 else 1 / (1.2 * load)

        def reached(self, parts, level):
            return [self.at_most(*part) for part in parts]

    found = GroupSearch(3, IdenticalNodes(1, 2), Fixed()).best(0.0, 100)
    assert dict(found.parts) == {(0,): 1, (1, 2): 1} and found.headroom == 1.0
