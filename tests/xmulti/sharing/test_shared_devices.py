"""Plans in which models share devices: who is placed where, what replays say of it, and what can't share."""

import functools
import json
import math
from dataclasses import replace

import pytest

from exegpt.cli import main
from xcore import document
from xcore.batching.shared_pool import block_of, merged_bytes, shared_pools
from xcore.errors import Infeasible, InputError
from xcore.specs.cluster import parse_cluster
from xcore.specs.cluster_plan import Plan, Share
from xcore.specs.schedule import BLOCK_SIZE
from xmulti.plans import planning
from xmulti.plans.demands import read_demands
from xmulti.plans.plan_evaluation import IN_TIME, KEEPS_UP, Trial, drawn, evaluated, in_one_time, in_time
from xmulti.plans.planning import METHODS, make_plan, propose
from xmulti.sharing.placement import Placer
from xmulti.sharing.plan_replay import replay_models, replay_plan
from xmulti.sharing.shared_devices import (
    MAX_NUM_SEQS,
    PREFILL_TOKENS,
    most_of_unit,
    other_bytes,
    planned_on,
    popular_of,
    share_unit,
    usable_bytes,
)
from xmulti.sharing.staged_placement import Groups
from xmulti.stages.two_stage import ServiceGroup
from xsimulator.cost.cost_model import ReplicaCost

CLUSTER = parse_cluster("2xA100-80GB")
BUSY = {"name": "busy", "model": "opt-1.3b", "workload": "128/64", "rate": "60/s", "latency_bound": "6s"}
IDLE = {"name": "idle", "model": "opt-2.7b", "workload": "128/32", "rate": "0.5/s", "latency_bound": "6s"}
RARE = {"name": "rare", "model": "opt-1.3b", "workload": "64/32", "rate": "0.5/s", "latency_bound": "6s"}


def demands_of(path, *models, cluster="2xA100-80GB"):
    file = path / "models.yaml"
    file.write_text(json.dumps({"models": models}))
    return read_demands(file, cluster)


@pytest.fixture(scope="module")
def demands(tmp_path_factory):
    return demands_of(tmp_path_factory.mktemp("models"), BUSY, IDLE, RARE)


@pytest.fixture(scope="module")
def planned(demands, seallm_plan):
    return functools.cache(lambda method: seallm_plan if method == "seallm" else make_plan(demands, CLUSTER, method))


LONG = [pytest.param(method, marks=pytest.mark.slow) for method in ("alpaserve", "muxserve", "temporal")]


@pytest.fixture(scope="module", params=["seallm", *LONG])
def plan(request, planned):
    return planned(request.param)


def test_more_models_than_devices_meet_their_rates(plan, demands):
    assert [model.name for model in plan.models] == ["busy", "idle", "rare"]
    shared = [unit for unit in plan.units if len(unit) > 1]
    assert shared and all(model.share for unit in shared for model in unit)
    for model, demand in zip(plan.models, demands, strict=True):
        assert model.headroom >= 1 and model.attainment >= 0.99
        assert model.goodput_seq_s == pytest.approx(model.headroom * demand.rate_seq_s)


def test_memory_of_a_unit_is_not_given_twice(plan):
    for unit in plan.units:
        device = CLUSTER.device.memory_bytes * CLUSTER.memory_fraction
        weights = sum(2 * model.schedule.model.spec.parameters for model in unit)
        spec = [model.schedule.model.spec for model in unit]
        blocks = [
            m.schedule.kv_blocks * m.schedule.block_size * s.layers * s.kv_bytes()
            for m, s in zip(unit, spec, strict=True)
        ]
        assert weights + sum(blocks) < len(unit[0].devices) * device


def test_a_model_takes_no_more_memory_than_its_sequences_can_use(plan):
    given = {}
    for model in plan.models:
        schedule, lengths = model.schedule, model.schedule.workload
        blocks = -(-(lengths.input.max + lengths.output.max) // schedule.block_size) + 1
        given[model.name] = schedule.kv_blocks / (schedule.control.max_num_seqs * blocks)
    assert max(given.values()) == 1, "the busy model's sequences can use all that it has"


@pytest.mark.parametrize("devices", [1, 2])
def test_every_device_of_a_unit_has_room_for_what_all_its_models_need(devices, demands):
    unit = share_unit(demands, CLUSTER, devices, "time", 1.0)
    by_name = {demand.name: demand for demand in demands}
    bytes_of_a_device = 0.0
    for model in unit:
        costs = ReplicaCost.of(model.schedule, by_name[model.name].setting.profile)
        (memory,) = costs.memory((PREFILL_TOKENS, MAX_NUM_SEQS))
        bytes_of_a_device += memory.bytes(model.schedule.kv_blocks)
    assert bytes_of_a_device <= CLUSTER.device.memory_bytes * CLUSTER.memory_fraction


def test_a_shared_plan_round_trips_and_shows(plan, tmp_path, capsys):
    document.write(tmp_path / "plan.json", plan)
    assert document.read(Plan, tmp_path / "plan.json") == plan
    assert main(["show", str(tmp_path / "plan.json")]) == 0
    shown = capsys.readouterr().out
    ways = {"temporal": "time", "muxserve": "time", "seallm": "priority", "alpaserve": "time"}
    assert "busy" in shown and ways[plan.method] in shown


def test_devices_are_shared_whole_and_in_one_way(plan):
    unit = next(unit for unit in plan.units if len(unit) > 1)
    other = "time" if unit[0].share.by == "space" else "space"
    mixed = tuple(replace(m, share=Share(other)) if m is unit[0] else m for m in plan.models)
    with pytest.raises(InputError, match="share all their devices in the same way"):
        replace(plan, models=mixed)
    with pytest.raises(InputError, match="share of devices for decoding is 0"):
        Share("space", 0.0)


@pytest.mark.parametrize(("kind", "devices", "way"), [("cuda", 1, "space"), ("cuda", 2, "time"), ("cpu", 1, "time")])
def test_a_plan_lets_models_compute_at_once_only_on_one_gpu(demands, kind, devices, way):
    cluster = replace(CLUSTER, device=replace(CLUSTER.device, kind=kind), nodes=1, devices_per_node=devices)
    two = [demand for demand in demands if demand.name in ("busy", "idle")]
    assert bool(share_unit(two, cluster, devices, "space", 1e-3)) == (way == "space")
    placer = Placer(usable_bytes(two, cluster), other_bytes(two, cluster))
    mesh = placer.unit([popular_of(demand, cluster) for demand in two], tuple(range(devices)), math.inf)
    planned = planned_on(mesh, placer.kv_bytes(mesh), {d.name: d for d in two}, cluster, Share("space", 1.0))
    assert {model.share.by for model in planned} == {way}
    assert all((model.share.decode < 1) == (way == "space") for model in planned)


def profile_of(demands):
    profiles = {demand.name: demand.setting.profile for demand in demands}
    return lambda model: profiles[model.name]


def test_a_replay_of_one_models_requests_leaves_the_others_out(plan, demands):
    requests = {"idle": demands[1].setting.workload.draw(20)}
    replays = replay_plan(plan, profile_of(demands), requests, timeline=True)
    assert set(replays) == {"idle"} and len(replays["idle"].served) == 20
    devices = {span.device for span in replays["idle"].spans}
    assert devices and devices <= set(plan.models[1].devices)


def test_goodput_is_where_one_more_step_would_miss(plan, demands):
    by_name = {demand.name: demand for demand in demands}
    unit = plan.units[0]
    factor = unit[0].headroom
    faster = {name: replace(demand, rate_seq_s=demand.rate_seq_s * factor * 1.5) for name, demand in by_name.items()}
    raised = [replace(model, rate_seq_s=faster[model.name].rate_seq_s) for model in unit]
    assert any(model.headroom < 1 for model in evaluated(raised, faster))


def in_time_to_the_end(trial, factor):
    """Whether a trial is sustained, by a replay that is followed to its end."""
    for name, served in trial.replayed(factor).items():
        latest_s = KEEPS_UP * served.arrival_s.max() + served.finish_s.min()
        share = (served.latencies("arrival")["latency"] <= trial.demands[name].bound_s).mean()
        if served.finish_s.max() > latest_s or share < IN_TIME:
            return False
    return True


@pytest.mark.parametrize(("by", "bound_s"), [("space", 0.2), ("time", 0.2), ("time", 1e3)])
def test_a_replay_that_ends_early_judges_as_one_to_its_end(by, bound_s, tmp_path):
    """A tight bound is missed by too many, a loose one by none, and then the last request comes too late."""
    chat = {"name": "a", "model": "opt-1.3b", "workload": "128/8", "rate": "40/s", "latency_bound": f"{bound_s}s"}
    two = demands_of(tmp_path, chat, chat | {"name": "b", "model": "opt-2.7b", "rate": "20/s"})
    by_name = {demand.name: demand for demand in two}
    requests = {name: replace(own, seconds=5.0, least_s=5.0) for name, own in drawn(by_name).items()}
    most = most_of_unit(two, CLUSTER, 1)
    trial = Trial(share_unit(two, CLUSTER, 1, by, most / 2), by_name, requests)
    factors = [most * share for share in (0.05, 0.6, 0.8, 0.9, 1.2, 2.5)]
    judged = [trial.sustained(factor) for factor in factors]
    assert judged == [in_time_to_the_end(trial, factor) for factor in factors]
    assert judged[0] and not judged[-1]


def test_what_is_below_a_level_is_not_measured(tmp_path):
    chat = {"name": "a", "model": "opt-1.3b", "workload": "128/8", "rate": "40/s", "latency_bound": "1s"}
    two = demands_of(tmp_path, chat, chat | {"name": "b"})
    by_name, unit = {demand.name: demand for demand in two}, share_unit(two, CLUSTER, 1, "space", 1.0)
    requests = {name: replace(own, seconds=2.0, least_s=2.0) for name, own in drawn(by_name).items()}
    known = evaluated(unit, by_name, requests)[0].headroom
    above, below = (evaluated(unit, by_name, requests, share * known)[0].headroom for share in (1.1, 0.9))
    assert above == 0.0 and below == pytest.approx(known, rel=0.03)


def test_shares_within_a_bound(plan, demands):
    served = replay_plan(plan, profile_of(demands), {"rare": demands[2].setting.workload.draw(30)})
    assert in_time(served["rare"].served, None) == 1.0 and in_time(served["rare"].served, 1e-9) == 0.0


@pytest.mark.slow
def test_ours_is_no_worse_than_any_other_and_shares_where_devices_are_too_few(demands, monkeypatch):
    monkeypatch.setattr(planning, "_POLICIES", {"exegpt": ("orca",), "spatial": ("orca",)})
    proposals = propose(demands, CLUSTER, METHODS)
    ours, *others = proposals
    assert ours.method == "exegpt" and all(ours.order <= other.order for other in others)
    assert any(model.share for model in ours.plan.models)  # three models on two devices
    reasons = {other.method: ours.why_before(other) for other in others}
    assert reasons["spatial"] == "spatial has no plan"
    assert "times its rate, but with" in " ".join(reasons.values()) or "gives an equally good plan" in " ".join(
        reasons.values()
    )


@pytest.mark.slow
def test_prices_and_reasons_are_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(planning, "_POLICIES", {"exegpt": ("orca",), "spatial": ("orca",)})
    demands_of(tmp_path, BUSY, IDLE)
    (tmp_path / "prices.yaml").write_text("A100-80GB: 2.5")
    where = [str(tmp_path / "models.yaml"), "--cluster", "2xA100-80GB", "--method", "best"]
    assert main(["plan", *where, "--price", str(tmp_path / "prices.yaml")]) == 0
    printed = capsys.readouterr().out
    assert "price/h" in printed and "exegpt is best:" in printed and "2 of 2" in printed
    assert main(["plan", *where, "--price", str(tmp_path / "missing.yaml")]) == 2


@pytest.mark.slow
def test_what_cant_share_is_named(tmp_path, demands):
    offline = {"name": "batch", "model": "opt-1.3b", "workload": "128/32", "requests": 10}
    with pytest.raises(InputError, match="Model 'batch' has no rate, so it can't share devices: use --method exegpt"):
        make_plan(demands_of(tmp_path, BUSY, offline), CLUSTER, "muxserve")
    big, one = IDLE | {"model": "opt-30b"}, parse_cluster("1xA100-80GB")
    for method in ("muxserve", "seallm", "alpaserve"):
        with pytest.raises(Infeasible, match=r"don't fit on 1xA100-80GB together. Their weights take \d+ GB"):
            make_plan(demands_of(tmp_path, big, big | {"name": "two"}, cluster="1xA100-80GB"), one, method)
    three = demands_of(tmp_path, *(IDLE | {"name": name} for name in "abc"), cluster="1xA100-80GB")
    with pytest.raises(
        Infeasible, match=r"3 models don't fit 1xA100-80GB: at most 2 share a group .* it has 1 device;"
    ):
        make_plan(three, one, "seallm")
    with pytest.raises(
        Infeasible, match=r"Model '(busy|idle)' misses .* devices?, which it shares with '(busy|idle)'; the plan"
    ):
        make_plan(demands_of(tmp_path, BUSY | {"rate": "5000/s"}, IDLE), CLUSTER, "muxserve")


def shared_unit(plan):
    return next(unit for unit in plan.units if len(unit) > 1)


def block_sizes(unit):
    return [block_of(m.schedule.model.spec, m.schedule.block_size, m.schedule.kv_dtype) for m in unit]


@pytest.mark.parametrize(
    ("method", "by"), [("seallm", "priority"), pytest.param("alpaserve", "time", marks=pytest.mark.slow)]
)
def test_models_in_seallms_groups_take_merged_blocks_of_all_their_memory(planned, method, by):
    """A model may have as many blocks as all of a unit's memory holds, where its neighbours take none."""
    unit = shared_unit(planned(method))
    assert {(model.share.by, model.share.pool) for model in unit} == {(by, "merged")}
    sizes = block_sizes(unit)
    memory = sum(m.schedule.kv_blocks * size for m, (size, _) in zip(unit, sizes, strict=True))
    merged = merged_bytes(sizes)
    schedules = [model.schedule for model in unit]
    for pool, (size, _) in zip(shared_pools(schedules, "merged")[1], sizes, strict=True):
        assert pool.total == memory // merged * (merged // size)
    for pool, schedule in zip(shared_pools(schedules, "quotas")[1], schedules, strict=True):
        assert schedule.kv_blocks <= pool.total < 1.02 * schedule.kv_blocks


def test_groups_are_judged_by_replays_under_their_own_rule(demands):
    """On one device, of models that ask for more than it has: whose requests are late depends on whose turn it is."""
    loaded = [replace(demand, rate_seq_s=4 * demand.rate_seq_s) for demand in demands]
    names, found = ("busy", "idle"), {}
    by_priority = Groups(loaded, CLUSTER, "priority").planned((0,), names)
    for by in ("priority", "time"):
        groups = Groups(loaded, CLUSTER, by)
        found[by] = groups.outcomes((ServiceGroup((0,), names),))
        unit = [replace(model, share=Share(by, 1.0, "merged")) for model in by_priority]
        replayed = Trial(unit, groups.demands, drawn(groups.demands)).replayed(1.0)
        for name, outcome in found[by].items():
            latency = replayed[name].latencies("arrival")["latency"]
            asked = drawn(groups.demands)[name].count(1.0)
            share = sum(latency > groups.demands[name].bound_s) / len(latency)
            assert outcome.requests == asked and outcome.late == round(asked * share)
    assert any(found["priority"][name].late != found["time"][name].late for name in names)


def test_sharing_merged_blocks_has_its_price_and_quotas_none(planned, demands):
    """One request of each model, one job at a time: when the last is done is how long all iterations took."""
    unit = shared_unit(planned("seallm"))
    by_name = {demand.name: demand for demand in demands}
    requests = {m.name: by_name[m.name].setting.workload.draw(1) for m in unit}
    profiles = {m.name: replace(by_name[m.name].setting.profile, front_end_s=0.0) for m in unit}
    quotas = [replace(m, share=replace(m.share, pool="quotas")) for m in unit]
    merged, plain = (
        max(s.finish_s for of_model in replay_models(each, profiles, requests).values() for s in of_model.served)
        for each in (unit, quotas)
    )
    unlike = len(set(block_sizes(unit))) > 1
    assert merged == pytest.approx((1.08 if unlike else 1.04) * plain)


def test_models_that_share_are_asked_over_the_same_time(demands):
    """A rare one would otherwise be alone for most of its requests."""
    assert in_one_time({"a": 1000, "b": 1000}, {"a": 8.0, "b": 1.0}, 9000) == {"a": 8000, "b": 1000}
    assert in_one_time({"a": 1000, "b": 100}, {"a": 100.0, "b": 0.5}, 4000) == {"a": 4000, "b": 20}
    assert in_one_time({"a": 6000, "b": 100}, {"a": 100.0, "b": 0.5}, 4000) == {"a": 6000, "b": 30}
    assert in_one_time({"a": 7}, {"a": 0.1}, 1) == {"a": 7}
    assert in_one_time({"a": 1000, "b": 100}, {"a": 1e9, "b": 1e-9}, 4000) == {"a": 4000, "b": 1}
    by_name = {demand.name: demand for demand in demands}
    unit = Groups(demands, CLUSTER, "time").planned((0,), ("busy", "idle"))
    trial = Trial(unit, by_name, drawn(by_name))
    for factor in (1.0, 3.0):
        busy, idle = (trial.requests(name, factor) for name in ("busy", "idle"))
        assert len(busy) == 4000 and busy[-1].arrival_s == pytest.approx(4000 / 60 / factor, rel=0.1)
        assert len(idle) == 33 and idle[-1].arrival_s == pytest.approx(busy[-1].arrival_s, rel=0.3)


def test_keys_and_values_of_a_unit_are_divided_and_not_given_twice(demands):
    """Each of two models has room for its longest sequence, and both together get no more than the memory."""
    popular = [popular_of(demand, CLUSTER) for demand in demands[:2]]
    placer = Placer(usable_bytes(demands, CLUSTER), other_bytes(demands, CLUSTER))
    mesh = placer.unit(popular, (0,), 1.0)
    kv_bytes = 1.5 * sum(each.least_bytes for each in popular)
    unit = planned_on(mesh, kv_bytes, {demand.name: demand for demand in demands}, CLUSTER, Share("time", 1.0))
    sizes = {each.name: each.kv_token_bytes * BLOCK_SIZE for each in popular}
    least = {each.name: each.least_bytes for each in popular}
    kv_bytes_of = {model.name: model.schedule.kv_blocks * sizes[model.name] for model in unit}
    assert kv_bytes - sum(sizes.values()) < sum(kv_bytes_of.values()) <= kv_bytes, "whole blocks"
    assert all(kv_bytes_of[name] > least[name] - sizes[name] for name in kv_bytes_of)


def test_without_a_bound_a_request_is_late_beyond_five_times_its_time_alone(tmp_path):
    """At a low rate each request has the devices alone: none is late, though each takes seconds."""
    slow = {"name": "slow", "model": "opt-6.7b", "workload": "128/400", "rate": "0.01/s"}
    demands = demands_of(tmp_path, slow)
    groups = Groups(demands, CLUSTER, "priority")
    late, normalised = groups._replay(1, (("slow", 0, 1),))["slow"]
    assert late == 0.0 and normalised < 2.0
