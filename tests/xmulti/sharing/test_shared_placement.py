"""Inputs of placements on shared devices, computed by hand, and placements without room."""

import math
from dataclasses import replace

import pytest

from tests.xmulti.sharing.test_shared_devices import BUSY, CLUSTER, IDLE, RARE, demands_of
from xcore.batching.shared_pool import block_of, least_memory
from xcore.errors import Infeasible, InputError
from xcore.specs.cluster import parse_cluster
from xcore.specs.schedule import BLOCK_SIZE
from xmulti.plans import plan_evaluation
from xmulti.sharing.placement import MOST_SHARES
from xmulti.sharing.shared_devices import (
    MAX_NUM_SEQS,
    PREFILL_TOKENS,
    most_of_unit,
    place_together,
    popular_of,
    share_unit,
)
from xmulti.sharing.staged_placement import Groups, place_in_groups
from xmulti.stages.two_stage import ServiceGroup


@pytest.fixture
def demands(tmp_path):
    return demands_of(tmp_path, BUSY, IDLE, RARE)


def test_a_models_figures_for_placements_are_those_of_its_spec(demands):
    """OPT-2.7B: 32 layers of 2,560 numbers, in two bytes; requests of 128 and 32 tokens on average."""
    popular, (_, idle, _) = popular_of(demands[1], CLUSTER), demands
    lengths, model = idle.setting.workload, idle.setting.model
    assert (popular.name, popular.rate_seq_s, popular.input, popular.output) == ("idle", 0.5, 128, 32)
    assert popular.kv_token_bytes == 32 * 2 * 2560 * 2 and popular.work == 0.5 * model.parameters
    assert popular.weight_bytes == pytest.approx(2 * model.parameters, rel=0.01)
    tokens = lengths.input.max + lengths.output.max
    assert popular.longest % BLOCK_SIZE == 0 and BLOCK_SIZE <= popular.longest - tokens < 2 * BLOCK_SIZE
    assert popular.cost(1) and popular.cost(2) and popular.cost(3) is None
    assert (
        most_of_unit(demands, CLUSTER, 2) > most_of_unit(demands, CLUSTER, 1) > 0 == most_of_unit(demands, CLUSTER, 3)
    )
    profile = idle.setting.profile
    one = replace(profile, degrees=tuple(degree for degree in profile.degrees if degree.tp == 1))
    alone = popular_of(replace(idle, setting=replace(idle.setting, profile=one)), CLUSTER)
    assert alone.cost(1) and alone.cost(2) is None


def test_models_with_an_encoder_do_not_share(tmp_path):
    (encoder,) = demands_of(tmp_path, BUSY | {"model": "t5-3b"})
    with pytest.raises(InputError, match="Model 'busy' has an encoder, so it can't share devices"):
        popular_of(encoder, CLUSTER)


@pytest.mark.parametrize("by", ["space", "time"])
def test_a_placement_has_every_model_on_devices_of_its_mesh_in_the_order_of_the_demands(demands, by):
    seen = []
    planned = place_together(demands, CLUSTER, by, lambda done, total: seen.append((done, total)))
    assert [model.name for model in planned] == ["busy", "idle", "rare"] and seen == [(0, 2), (1, 2)]
    meshes = {model.devices for model in planned}
    assert sorted(device for mesh in meshes for device in mesh) in ([0, 1], [0], [1])
    for mesh in meshes:
        on = [model for model in planned if model.devices == mesh]
        if len(on) == 1:
            assert on[0].share is None
            continue
        assert {model.share.by for model in on} == {by if len(mesh) == 1 else "time"}
        assert sum(model.share.decode for model in on) <= (MOST_SHARES if on[0].share.by == "space" else len(on))


def test_models_that_fit_nowhere_are_told_with_their_weights(tmp_path):
    big, one = IDLE | {"model": "opt-30b"}, parse_cluster("1xA100-80GB")
    two = demands_of(tmp_path, big, big | {"name": "two"}, cluster=one.name)
    weights = 2 * 2 * two[0].setting.model.parameters / 1e9
    with pytest.raises(Infeasible, match=rf"don't fit on 1xA100-80GB together\. Their weights take {weights:.0f} GB"):
        place_together(two, one, "time", lambda done, total: None)
    with pytest.raises(Infeasible, match=f"Their weights take {weights:.0f} GB"):
        place_in_groups(two, one, "time", lambda done, total: None)
    assert share_unit(two, one, 1, "time", 1.0) is None
    three = demands_of(tmp_path, *(IDLE | {"name": name} for name in "abc"), cluster=one.name)
    with pytest.raises(Infeasible, match="3 models don't fit on 1xA100-80GB: at most 2 can share a group of devices"):
        place_in_groups(three, one, "time", lambda done, total: None)


@pytest.mark.parametrize(
    ("workload", "prompts"), [("128/32", 16), ("3000/32", 1), ("1500/8", 1), ("4/8", MAX_NUM_SEQS)]
)
def test_as_many_prompts_are_prefilled_together_as_have_so_many_tokens(tmp_path, workload, prompts):
    (demand,) = demands_of(tmp_path, BUSY | {"workload": workload, "model": "llama-3.2-1b"})
    (planned,) = share_unit([demand], CLUSTER, 1, "time", 1.0)
    control = planned.schedule.control
    assert control.prefills_per_step == prompts and control.max_num_seqs == MAX_NUM_SEQS
    assert prompts == 1 or prompts == MAX_NUM_SEQS or prompts * 128 == PREFILL_TOKENS
    assert planned.schedule.latency_bound_s == 6.0 and planned.share is None


def test_a_group_has_room_where_the_longest_sequence_of_each_fits_into_merged_blocks(tmp_path):
    """Around the memory at which it just does."""
    demands = demands_of(tmp_path, BUSY, IDLE)
    names = ("busy", "idle")
    groups = Groups(demands, CLUSTER, "priority")
    settings = [demand.setting for demand in demands]
    sizes = [block_of(setting.model, BLOCK_SIZE, setting.kv_dtype) for setting in settings]
    longest = [groups.popular[name].longest // BLOCK_SIZE for name in names]
    free = groups._placer.kv_bytes(groups._mesh((0,), names))
    for more, room in ((1.0, True), (-1e7, False)):
        groups._placer._memory += least_memory(sizes, longest) - free + more
        free = groups._placer.kv_bytes(groups._mesh((0,), names))
        assert groups.have_room(1, names) == room
    assert not groups.have_room(3, names), "no degree of tensor parallelism is for three devices"
    planned = groups.models([ServiceGroup((1,), ("idle",)), ServiceGroup((0,), ()), ServiceGroup((0,), names)])
    assert [(model.name, model.devices) for model in planned] == [("busy", (0,)), ("idle", (1,)), ("idle", (0,))]


def test_all_requests_are_late_in_a_group_that_misses_the_level(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_evaluation, "REQUESTS", 60)
    monkeypatch.setattr(plan_evaluation, "LEAST", 20)
    demands, turns = demands_of(tmp_path, BUSY, IDLE), (("busy", 0, 1), ("idle", 0, 1))
    for level, late in (((), False), ((0.5,), False), ((1000.0,), True)):
        found = Groups(demands, CLUSTER, "priority", *level)._replay(1, turns)
        assert set(found) == {"busy", "idle"}
        for share, normalised in found.values():
            assert (share == 1.0 and normalised == math.inf) if late else (share < 0.2 and 1.0 <= normalised < 9.0)


def test_without_a_level_each_late_request_counts_alone(tmp_path, monkeypatch):
    """The models need more than a device has, under a bound that only their first requests keep."""
    monkeypatch.setattr(plan_evaluation, "REQUESTS", 200)
    busy = BUSY | {"rate": "600/s", "latency_bound": "1s"}
    demands = demands_of(tmp_path, busy, IDLE)
    found = Groups(demands, CLUSTER, "time")._replay(1, (("busy", 0, 1), ("idle", 0, 1)))
    assert 0.0 < found["busy"][0] < 1.0 and found["busy"][1] < math.inf
