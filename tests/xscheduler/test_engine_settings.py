"""A running engine's settings: as many sequences at a time as its cache holds."""

from dataclasses import replace

import pytest

from xcore.errors import InputError
from xcore.specs.cluster import parse_cluster
from xscheduler.engine_settings import EngineSettings, _part, engine_schedule, follow, resident
from xscheduler.settings import find_setting
from xsimulator import estimate
from xsimulator.replay.event_simulator import replay


@pytest.mark.parametrize("workload", ["2048/256", "T"])
def test_what_waits_is_what_a_replay_finds(workload):
    """An oracle: a long list through the event simulator, with far more slots than blocks."""
    setting = find_setting(
        "opt-13b" if workload == "T" else "llama-3.1-8b", "1xA40", workload, "roofline", memory_fraction=1.0
    )
    schedule = engine_schedule(setting, "chunked", 1, None, 16, max_num_seqs=2000, max_num_batched_tokens=2048)
    runs, notes = resident(schedule, setting.profile)
    assert 1 < runs.control.max_num_seqs < 2000 and "wait in the queue" in notes[-1]
    steady = estimate(runs, setting.profile)
    served = replay(
        schedule, setting.profile, setting.workload.draw(30 * runs.control.max_num_seqs, seed=3), timeline=False
    )
    ends = sorted(request.finish_s for request in served.served)
    middle = ends[len(ends) // 5 : -len(ends) // 5]
    assert steady.throughput_seq_s == pytest.approx((len(middle) - 1) / (middle[-1] - middle[0]), rel=0.05)


@pytest.mark.parametrize(("model", "policy", "blocks"), [("t5-11b", "orca", 144), ("llama-3.1-8b", "orca", 144)])
def test_the_least_blocks_of_an_engine_hold_its_longest_request(model, policy, blocks):
    """2,048 + 256 tokens: an encoder-decoder caches its start token too, so that 143 blocks and 15 tokens don't do."""
    outputs = 256 if model == "t5-11b" else 257  # a request's last token is never cached
    setting = find_setting(model, "1xA100-80GB", f"2048/{outputs}", "roofline")
    variables = {"max_num_seqs": 1, "prefills_per_step": 1}
    assert engine_schedule(setting, policy, 1, blocks, 16, **variables).kv_blocks == blocks
    longer = find_setting(model, "1xA100-80GB", f"2048/{outputs + 1}", "roofline")
    with pytest.raises(InputError, match=f"pass --kv-blocks {blocks + 1} or more"):
        engine_schedule(longer, policy, 1, blocks, 16, **variables)


@pytest.mark.parametrize(
    ("cluster", "replicas", "tp_degree", "devices"),
    [("3xA40", 1, 1, 3), ("3xA40", 1, 2, 2), ("4xA40", 1, 1, 4), ("4xA40", 2, 2, 2), ("4xA40", 3, 1, 1)],
)
def test_a_replica_has_its_equal_part_of_the_devices_in_whole_groups(cluster, replicas, tp_degree, devices):
    whole = parse_cluster(cluster)
    part = _part(whole, replicas, tp_degree)
    assert part.devices == devices <= whole.devices / replicas and part.device == whole.device
    if tp_degree == 1:
        assert _part(whole, replicas) == part


def test_what_was_chosen_for_a_policy_without_an_engine_is_said_and_nothing_where_all_was_passed():
    setting = find_setting("opt-1.3b", "1xA40", "128/32", "roofline")
    given = EngineSettings("static", variables={"encode_batch": 8})
    (schedule, notes), (fixed, none) = (
        follow(setting, replace(given, **passed)) for passed in ({}, {"tp_degree": 1, "replicas": 1})
    )
    (said,) = notes
    assert said.startswith("options that you did not pass were searched: ") and "replicas=1" in said
    assert none == () and fixed.control == schedule.control
