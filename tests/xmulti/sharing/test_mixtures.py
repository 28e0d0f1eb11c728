"""Mixtures of models that share devices and of models alone: bounds that replays keep, plans that no other has."""

import json
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from xcore.processes import Processes
from xcore.specs.cluster import parse_cluster
from xcore.specs.cluster_plan import Plan
from xmulti.plans import planning
from xmulti.plans.demands import read_demands
from xmulti.plans.model_frontier import ModelFrontier
from xmulti.plans.plan_evaluation import BLOCK, KEEPS_UP, Trial, drawn
from xmulti.plans.planning import propose
from xmulti.sharing import mixtures
from xmulti.sharing.groups import Grouping
from xmulti.sharing.mixtures import SharedGroups, better_alone
from xmulti.sharing.shared_devices import most_of_unit, share_unit

CLUSTER = parse_cluster("2xA100-80GB")
SMALL = ("opt-1.3b", "opt-2.7b", "llama-3.2-1b")


def demands_of(path, *models):
    file = path / "models.yaml"
    file.write_text(json.dumps({"models": models}))
    return read_demands(file, "2xA100-80GB")


def some_models(seed):
    random_ = random.Random(seed)
    return [
        {
            "name": f"m{i}",
            "model": random_.choice(SMALL),
            "workload": random_.choice(["128/32", "64/128", "512/16"]),
            "rate": f"{random_.choice([1, 5, 20])}/s",
            "latency_bound": random_.choice(["2s", "4s"]),
        }
        for i in range(random_.choice([2, 3]))
    ]


@pytest.mark.parametrize("by", ["space", "time"])
@pytest.mark.parametrize("seed", [2, 3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 1, 4, 5))])
def test_no_replay_is_better_than_the_bound(seed, by, tmp_path):
    demands, devices = demands_of(tmp_path, *some_models(seed)), 1 + seed % 2
    most = most_of_unit(demands, CLUSTER, devices)
    unit = share_unit(demands, CLUSTER, devices, by, most / 2)
    assert most > 0
    if unit is None:
        assert by == "space"  # shares that are wide enough are more than there are
        return
    by_name = {demand.name: demand for demand in demands}
    trial = Trial(unit, by_name, drawn(by_name))
    assert not trial.sustained(1.01 * KEEPS_UP * most) and trial.sustained(most / 50)


def test_models_without_room_share_nothing(tmp_path):
    model = {"name": "a", "model": "opt-30b", "workload": "128/32", "rate": "1/s", "latency_bound": "20s"}
    demands = demands_of(tmp_path, model, model | {"name": "b"})
    assert most_of_unit(demands, CLUSTER, 1) == 0 and share_unit(demands, CLUSTER, 1, "time", 1.0) is None
    assert most_of_unit(demands, CLUSTER, 2) > 0 and share_unit(demands, CLUSTER, 2, "time", 1.0)


def test_requests_are_the_same_whatever_shares_devices(tmp_path):
    demands = demands_of(tmp_path, *some_models(1))
    by_name = {demand.name: demand for demand in demands}
    asked = drawn(by_name)
    together = share_unit(demands, CLUSTER, 2, "time", 1.0)
    both = Trial(together, by_name, asked)
    for model in together:
        name, rate = model.name, by_name[model.name].rate_seq_s
        alone = Trial([replace(model, share=None)], by_name, asked)
        assert both.requests(name, 2.0) == alone.requests(name, 2.0)
        slow, fast = both.requests(name, 1.0), both.requests(name, 50.0)
        assert [r.input for r in slow] == [r.input for r in fast[: len(slow)]] and len(fast) > BLOCK
        assert [r.arrival_s for r in slow] == pytest.approx([50 * r.arrival_s for r in fast[: len(slow)]])
        arrivals = [r.arrival_s for r in fast]
        assert arrivals[0] == 0 and arrivals == sorted(arrivals)
        assert len(fast) / arrivals[-1] == pytest.approx(50 * rate, rel=0.1)
        assert len(fast) == pytest.approx(50 * rate * 3 * max(d.bound_s for d in demands), abs=1)


@pytest.mark.slow
def test_offline_models_have_their_own_devices_and_others_share(tmp_path, monkeypatch):
    """Three models on two devices, one of which can't share: only a mixture has room for all."""
    monkeypatch.setattr(planning, "_POLICIES", {"exegpt": ("orca",), "spatial": ("orca",)})
    online = {"model": "opt-1.3b", "workload": "128/32", "rate": "20/s", "latency_bound": "2s"}
    batch = {"name": "batch", "model": "opt-1.3b", "workload": "128/32", "requests": 200}
    demands = demands_of(tmp_path, online | {"name": "a"}, online | {"name": "b"}, batch)
    (ours,) = propose(demands, CLUSTER, ("exegpt",))
    a, b, alone = ours.plan.models
    assert a.devices == b.devices and a.share and b.share and alone.share is None
    assert not set(alone.devices) & set(a.devices) and ours.headroom > 1 and alone.seconds > 0


@pytest.mark.slow
def test_what_cant_be_better_is_not_planned(demands_and_plan):
    demands, plan = demands_and_plan
    best = replace(plan, models=tuple(replace(m, goodput_seq_s=1e6 * m.rate_seq_s) for m in plan.models))
    frontiers = planning._frontiers(demands, "exegpt")
    mixture = SharedGroups(demands, CLUSTER, frontiers, Processes(), 0.0)
    assert mixture.improve([best], lambda done, total: None) is None
    assert sum(len(frontier.searched) for frontier in frontiers) <= len(demands), "one number bounds the others"


@pytest.mark.slow
def test_models_that_share_are_not_replayed_if_one_alone_is_below_the_level_until_they_matter(tmp_path):
    """Two that share a device reach the level, a third one beside them is far below it."""
    small = {"model": "opt-1.3b", "workload": "128/8", "rate": "10/s", "latency_bound": "2s"}
    slow = small | {"name": "slow", "model": "opt-2.7b", "rate": "2000/s"}
    demands = demands_of(tmp_path, small | {"name": "a"}, small | {"name": "b"}, slow)
    pair = share_unit(demands[:2], CLUSTER, 1, "time", 1.0)
    alone = replace(share_unit(demands[2:], CLUSTER, 1, "time", 1e-3)[0], devices=(1,))
    plan = Plan(Plan.VERSION, "temporal", CLUSTER, (*pair, alone))
    with Processes() as processes:
        (measured,) = planning._measured([plan], demands, 2.0, processes)
        assert [model.headroom for model in measured.models] == [None, None, 0.0]
        (whole,) = planning._measured([replace(plan, models=(*pair,))], demands[:2], 2.0, processes)
        mixture = SharedGroups(demands, CLUSTER, [], processes, 2.0)
        (of_pair, *_) = [units for (group, _), units in mixture._seeds([measured]).items() if len(group) == 2]
        assert mixture._best(((0, 1), 1), of_pair) == pytest.approx(whole.headroom, rel=0.05) and whole.headroom > 2
        assert [model.name for model in mixture._planned[(0, 1), 1]] == ["a", "b"]


@pytest.fixture
def demands_and_plan(tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "_POLICIES", {"exegpt": ("orca",), "spatial": ("orca",)})
    demands = demands_of(tmp_path, *some_models(2))
    return demands, planning.make_plan(demands, CLUSTER, "temporal")


@pytest.fixture
def pair_and_alone(tmp_path):
    """Two models that share a device, and one on the other; nothing is replayed."""
    demands = demands_of(tmp_path, *[{**some_models(0)[0], "name": name} for name in "abc"])
    (alone,) = share_unit(demands[2:], CLUSTER, 1, "time", 1.0)
    return demands, share_unit(demands[:2], CLUSTER, 1, "time", 1.0), replace(alone, devices=(1,))


def test_units_of_other_plans_are_known_by_their_models_and_devices(pair_and_alone):
    """Units of a plan with replicas are left out: a model would be in several groups."""
    demands, pair, alone = pair_and_alone
    plan = Plan(Plan.VERSION, "temporal", CLUSTER, (*pair, alone))
    twice = Plan(Plan.VERSION, "seallm", CLUSTER, (alone, replace(alone, devices=(0,))))
    with Processes() as processes:
        mixture = SharedGroups(demands, CLUSTER, [], processes, 1.0)
        assert mixture._seeds([plan, twice]) == {((0, 1), 1): [tuple(pair)], ((2,), 1): [(alone,)]}


def test_models_without_a_rate_count_where_they_are_done_in_time(pair_and_alone):
    demands, _, alone = pair_and_alone
    job = replace(alone, rate_seq_s=None, requests=10)
    with Processes() as processes:
        mixture = SharedGroups(demands, CLUSTER, [], processes, 1.0)
    mixture.seconds = 5.0
    assert [mixture._of([replace(job, seconds=seconds)]) for seconds in (4.0, 5.0, 6.0)] == [math.inf, math.inf, 0.0]
    served = replace(alone, goodput_seq_s=3.0 * alone.rate_seq_s)
    assert mixture._of([served]) == 3.0 == mixture._of([served, replace(job, seconds=4.0)])
    assert mixture._of([served, replace(job, seconds=6.0)]) == 0.0


def test_the_better_way_alone_has_more_headroom_or_is_quicker(pair_and_alone):
    demands, _, alone = pair_and_alone
    none, some, more = (replace(alone, goodput_seq_s=by * alone.rate_seq_s) for by in (0.0, 0.5, 2.0))
    job = replace(alone, rate_seq_s=None, requests=10)
    slow, quick = (replace(job, seconds=seconds) for seconds in (9.0, 5.0))
    for worse, better in [(none, some), (some, more), (slow, quick)]:
        assert better_alone(worse, better, demands[2], None) == better == better_alone(better, worse, demands[2], None)


def test_models_that_share_are_measured_with_room_for_their_rates_whatever_the_level(pair_and_alone, monkeypatch):
    """Below level 1 they are placed as for level 1, and above it as for their level."""
    demands, *_ = pair_and_alone
    factors = []
    monkeypatch.setattr(mixtures, "share_unit", lambda *arguments: factors.append(arguments[-1]))
    for level in (0.1, 3.0):
        assert mixtures.measured(demands[:2], [None, None], CLUSTER, 1, None, level) is None
    assert set(factors[: len(factors) // 2]) == {1.0} and set(factors[len(factors) // 2 :]) == {3.0}


class Direct:
    """A stand-in for processes that returns the planned models, `pair` for those that share, and keeps its rows."""

    def __init__(self, pair):
        self.pair, self.asked = pair, []

    def each(self, work, rows):
        self.asked += rows
        if work is better_alone:
            return [planned for planned, *_ in rows]
        return [[alone] if alone else self.pair for *_, alone, _ in rows]


def test_only_models_alone_are_searched_and_only_others_are_measured_together(pair_and_alone, monkeypatch):
    demands, pair, alone = pair_and_alone
    pair = [replace(model, goodput_seq_s=2.0 * model.rate_seq_s) for model in pair]
    alone = replace(alone, goodput_seq_s=3.0 * alone.rate_seq_s)
    served = SimpleNamespace(planned=lambda demand: alone)
    frontiers = [SimpleNamespace(on=lambda devices: served) for _ in demands]
    searched = []
    monkeypatch.setattr(ModelFrontier, "search", lambda asked, processes: searched.append(asked))
    monkeypatch.setattr(ModelFrontier, "with_all_policies", lambda asked, processes: [served for _ in asked])
    mixture, parts = SharedGroups(demands, CLUSTER, frontiers, Direct(pair), 1.0), (((0, 1), 1), ((2,), 1))
    assert mixture.reached(parts, 1.0) == [2.0, 3.0] and searched == [[(frontiers[2], 1)]]
    assert [asked[4] for asked in mixture._processes.asked] == [None, alone]
    plan = mixture._plan(Grouping(parts, ((1,), (0,)), 2.0))
    assert searched[1:] == [[(frontiers[2], 1)]]
    assert plan.models == (*(replace(model, devices=(1,)) for model in pair), replace(alone, devices=(0,)))
