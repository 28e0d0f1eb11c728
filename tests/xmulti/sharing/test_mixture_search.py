"""The search for mixtures, in which replays are rows of a table: the best of all partitions, and bounds by hand."""

import itertools
import math
import random
from dataclasses import dataclass, field, replace

import pytest

from tests.xmulti.sharing.test_groups import partitions
from tests.xmulti.sharing.test_mixtures import CLUSTER, demands_of
from xcore.specs.cluster_plan import Plan
from xmulti.plans.model_frontier import ModelFrontier
from xmulti.plans.plan_evaluation import KEEPS_UP, PRECISION, Trial, at_rates, drawn, evaluated
from xmulti.sharing import mixtures
from xmulti.sharing.budgets import place
from xmulti.sharing.groups import STEP
from xmulti.sharing.mixtures import LENIENT, SCALES, SharedGroups, better_alone, measured
from xmulti.sharing.shared_devices import most_of_unit, share_unit

ONLINE = {"model": "opt-1.3b", "workload": "128/8", "rate": "10/s", "latency_bound": "2s"}
SIZES = (1, 2)


@pytest.fixture(scope="module")
def demands(tmp_path_factory):
    return demands_of(tmp_path_factory.mktemp("models"), *(ONLINE | {"name": name} for name in "abc"))


@pytest.fixture(scope="module")
def unmeasured(demands):
    """Models on numbers of devices before any replay, by their places and their number of devices."""
    groups = [group for size in (1, 2, 3) for group in itertools.combinations(range(3), size)]
    return {
        (group, devices): tuple(share_unit([demands[i] for i in group], CLUSTER, devices, "time", 1e-3))
        for group in groups
        for devices in SIZES
    }


def with_headroom(unit, headroom):
    return tuple(replace(model, goodput_seq_s=headroom * model.rate_seq_s) for model in unit)


@dataclass
class Performance:
    """A model alone, whose replays reach a headroom."""

    model: object
    headroom: float

    def planned(self, demand):
        return self.model

    def budget(self, demand):
        return self


@dataclass
class Tabled:
    """Headrooms of all groups on all numbers of devices, in the place of processes, frontiers and replays."""

    headrooms: dict
    unmeasured: dict
    asked: list = field(default_factory=list)

    def part_of(self, names, devices):
        return tuple("abc".index(name) for name in names), devices

    def each(self, work, rows):
        return [self.replayed(work, row) for row in rows]

    def replayed(self, work, row):
        if work is better_alone:
            return row[0]
        if work is evaluated:
            unit = row[0]
            part = self.part_of([model.name for model in unit], len(unit[0].devices))
            return with_headroom(unit, self.headrooms[part])
        assert work is measured
        models, _, _, devices, alone, level = row
        part = self.part_of([demand.name for demand in models], devices)
        assert (alone is None) == (len(part[0]) > 1)
        self.asked.append(part)
        reached = self.headrooms[part]
        return with_headroom(self.unmeasured[part], reached) if alone or reached >= level else None

    def frontiers(self, monkeypatch):
        found = [Frontier(self, i) for i in range(3)]
        monkeypatch.setattr(ModelFrontier, "search", lambda wanted, processes: [f.find(n) for f, n in wanted])
        monkeypatch.setattr(ModelFrontier, "with_all_policies", lambda wanted, processes: [f.on(n) for f, n in wanted])
        return found


@dataclass
class Frontier:
    """A model alone on the numbers of devices that were asked for."""

    table: Tabled
    place: int
    known: dict = field(default_factory=dict)

    def find(self, devices):
        part = (self.place,), devices
        headroom = self.table.headrooms[part]
        self.known[devices] = Performance(self.table.unmeasured[part][0], headroom) if headroom else None

    @property
    def searched(self):
        return tuple(self.known.items())

    def on(self, devices):
        return self.known[devices]


def table_of(seed, demands):
    """Headrooms within the bounds of groups, where a group has none that a part of it has not."""
    rng, headrooms = random.Random(seed), {}
    for size, devices in itertools.product((1, 2, 3), SIZES):
        for group in itertools.combinations(range(3), size):
            most = most_of_unit([demands[i] for i in group], CLUSTER, devices)
            parts = [headrooms[one, devices] for one in itertools.combinations(group, size - 1) if one]
            headrooms[group, devices] = min([rng.uniform(0.3, 1.0) * most, *parts])
    for alone in ((0,), (1,), (2,)):
        headrooms[alone, 2] = rng.uniform(1.0, 2.0) * headrooms[alone, 1]
    return headrooms


def best_of(headrooms):
    """The highest least headroom of all partitions that have room, and its parts."""
    found = []
    for groups in partitions([0, 1, 2]):
        for numbers in itertools.product(SIZES, repeat=len(groups)):
            if place(numbers, CLUSTER.nodes, CLUSTER.devices_per_node):
                parts = tuple(zip(groups, numbers, strict=True))
                found.append((min(headrooms[part] for part in parts), parts))
    return max(found)


def plan_of(parts, headrooms, unmeasured):
    """A plan of parts, each on devices of its own, with the headrooms that are known."""
    numbered, models = itertools.count(), []
    for part in parts:
        devices = tuple(next(numbered) for _ in range(part[1]))
        unit = with_headroom(unmeasured[part], headrooms[part]) if part in headrooms else unmeasured[part]
        models += [replace(model, devices=devices) for model in unit]
    return Plan(Plan.VERSION, "temporal", CLUSTER, tuple(models))


@pytest.mark.parametrize("seed", range(12))
def test_the_mixture_is_the_best_of_all_partitions_if_no_other_plan_is_as_good(seed, demands, unmeasured, monkeypatch):
    """Other plans are measured; or a model alone misses the level, and its neighbours weren't replayed; or none is."""
    headrooms = table_of(seed, demands)
    most, parts = best_of(headrooms)
    pair, alone = ((0, 1), 1), ((2,), 1)
    known = [{}, headrooms, {alone: 0.0}][seed % 3]
    others = [(((0, 1, 2), 2),), (pair, alone)] if seed % 3 == 1 else [(pair, alone)] * bool(known)
    table = Tabled(headrooms, unmeasured)
    floor = max((min(known.get(part, math.inf) for part in other) for other in others), default=0.0)
    mixture = SharedGroups(demands, CLUSTER, table.frontiers(monkeypatch), table, 0.0)
    found = mixture.improve([plan_of(other, known, unmeasured) for other in others], lambda done, of: None)
    if found is None:
        assert most < floor * (1 + STEP)
    else:
        reached = min(model.headroom for model in found.models)
        assert most / (1 + STEP) <= reached * (1 + 1e-9) and reached <= most * (1 + 1e-9)
        assert [model.name for model in found.models] == ["a", "b", "c"]
        assert sum(len(unit[0].devices) for unit in found.units) <= CLUSTER.devices
    assert len(set(table.asked)) == len(table.asked)
    best = plan_of(parts, headrooms, unmeasured)
    assert SharedGroups(demands, CLUSTER, table.frontiers(monkeypatch), table, 0.0).improve([best], print) is None


def test_a_unit_of_other_plans_is_the_best_of_its_kind_and_replayed_if_it_was_not(demands, unmeasured):
    part = (0, 1), 1
    table = Tabled({part: 2.0}, unmeasured)
    mixture = SharedGroups(demands, CLUSTER, [], table, 0.0)
    low, high = (with_headroom(unmeasured[part], headroom) for headroom in (1.0, 3.0))
    for units, reached in (([unmeasured[part]], 2.0), ([low, unmeasured[part]], 2.0), ([unmeasured[part], high], 3.0)):
        assert mixture._best(part, units) == reached
        assert [model.headroom for model in mixture._planned[part]] == [reached] * 2
    assert mixture._best(((2,), 1), [with_headroom(unmeasured[(2,), 1], 0.0)]) == 0.0
    assert ((2,), 1) not in mixture._planned


def test_no_group_does_more_than_its_bound_and_one_that_cannot_share_nothing(demands, unmeasured, tmp_path):
    batch = ONLINE | {"name": "batch", "requests": 10}
    del batch["rate"]
    four = (*demands, *demands_of(tmp_path, batch))
    mixture = SharedGroups(four, CLUSTER, [], None, 0.0)
    assert mixture.at_most((0, 3), 1) == 0.0
    most = most_of_unit(demands[:2], CLUSTER, 1)
    assert mixture.at_most((0, 1), 1) == mixture.at_most((0, 1), 1) == KEEPS_UP * most > 0


def test_a_model_alone_is_bounded_by_what_was_searched(demands):
    """Searches leave a margin, so that replays find up to half as much again; on more devices a little more each."""
    table = Tabled({((0,), 1): 2.0, ((0,), 2): 3.0}, {((0,), 1): [None], ((0,), 2): [None]})
    frontier = Frontier(table, 0)
    mixture = SharedGroups(demands, CLUSTER, [frontier], None, 0.0)
    assert mixture.at_most((0,), 1) == math.inf
    frontier.find(1)
    assert mixture.at_most((0,), 1) == LENIENT * 2.0 and mixture.at_most((0,), 4) == LENIENT * 2.0 * SCALES * 4
    frontier.find(2)
    assert mixture.at_most((0,), 1) == LENIENT * 2.0, "the lower of two bounds"
    assert mixture.at_most((0,), 2) == LENIENT * 3.0 and mixture.at_most((0,), 4) == LENIENT * 3.0 * SCALES * 2
    frontier.known = {1: None}
    assert mixture.at_most((0,), 1) == 0.0 and mixture.at_most((0,), 2) == math.inf


def test_models_that_share_get_the_better_of_both_ways(tmp_path):
    """Beside the replays of each way to its highest factor; a level that neither reaches is told by None."""
    two = demands_of(tmp_path, *(ONLINE | {"name": name, "rate": "150/s"} for name in "ab"))
    by_name = {demand.name: demand for demand in two}
    asked = {name: replace(own, seconds=0.5, least_s=0.5) for name, own in drawn(by_name).items()}
    reached = []
    for way in ("space", "time"):
        trial = Trial(share_unit(two, CLUSTER, 1, way, 1.0), by_name, asked)
        reached.append(min(model.headroom for model in at_rates(trial, trial.highest(1.0))))
    arguments = two, list(asked.values()), CLUSTER, 1, None
    found = measured(*arguments, 1.0)
    assert [model.name for model in found] == ["a", "b"]
    assert min(model.headroom for model in found) == pytest.approx(max(reached), rel=2 * PRECISION)
    assert measured(*arguments, 1.1 * max(reached)) is None


def test_the_headroom_of_models_is_that_of_the_one_with_the_least(unmeasured):
    low, high = (with_headroom(unmeasured[(i,), 1], headroom)[0] for i, headroom in ((0, 0.5), (1, 4.0)))
    assert mixtures._headroom([high, low]) == 0.5 and mixtures._headroom([high]) == 4.0
    assert mixtures._headroom(unmeasured[(0,), 1]) == math.inf
    assert mixtures._measured([low, high]) and not mixtures._measured([low, *unmeasured[(2,), 1]])
