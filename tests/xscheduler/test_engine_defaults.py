"""Settings that engines take by themselves, by device."""

import pytest

from xcore.specs.cluster import parse_cluster
from xscheduler.engine_settings import EngineSettings, engine_defaults, follow
from xscheduler.settings import find_setting


@pytest.mark.parametrize(
    ("cluster", "tokens", "sequences"),
    [
        ("1xB200", 16384, 1024),
        ("1xH100-SXM", 8192, 1024),
        ("1xH200-SXM", 8192, 1024),
        ("1xRTXPRO6000", 8192, 1024),
        ("1xA800-80GB", 8192, 1024),
        ("1xA100-80GB", 2048, 256),
        ("1xL40S", 2048, 256),
        ("local", 2048, 256),
    ],
)
def test_vllms_sizes_go_by_memory_and_name(cluster, tokens, sequences):
    defaults = engine_defaults("vllm", parse_cluster(cluster))
    assert (defaults.max_num_batched_tokens, defaults.max_num_seqs) == (tokens, sequences)
    assert (defaults.admission, defaults.prefix_caching) == ("grow", True)


def followed(engine, policy=None, **settings):
    setting = find_setting("llama-3.1-8b", "1xH100-SXM", "2048/256", "roofline", engine=engine)
    return follow(setting, EngineSettings.of({"policy": policy, **settings}), engine)


def test_an_engine_that_is_named_brings_its_rules_and_says_so():
    schedule, assumed = followed("vllm")
    assert (schedule.admission, schedule.prefix_caching) == ("grow", True)
    assert (schedule.control.max_num_batched_tokens, schedule.control.max_num_seqs) == (8192, 1024)
    assert schedule.cluster.memory_fraction == 0.92
    assert assumed[:4] == (
        "max_num_batched_tokens: 8,192, the default of vllm on H100-SXM",
        "max_num_seqs: 1,024, the default of vllm on H100-SXM",
        "admission: grow, the default of vllm",
        "prefix caching: on, the default of vllm",
    )


def test_what_is_typed_stands_and_is_not_explained():
    schedule, assumed = followed(
        "vllm", max_num_batched_tokens=512, max_num_seqs=64, admission="reserve", prefix_caching=False
    )
    assert (schedule.admission, schedule.prefix_caching) == ("reserve", False)
    assert (schedule.control.max_num_batched_tokens, schedule.control.max_num_seqs, assumed) == (512, 64, ())


def test_without_an_engine_blocks_are_reserved():
    schedule, assumed = followed(None)
    assert (schedule.admission, schedule.prefix_caching, schedule.control.max_num_batched_tokens) == (
        "reserve",
        False,
        8192,
    )
    assert [text.split(":")[0] for text in assumed] == ["max_num_batched_tokens", "max_num_seqs"]


def test_another_engine_has_other_defaults():
    schedule, assumed = followed("tensorrt-llm")
    assert (schedule.control.max_num_batched_tokens, schedule.control.max_num_seqs, schedule.admission) == (
        8192,
        2048,
        "reserve",
    )
    assert "max_num_seqs: 2,048, the default of tensorrt-llm on H100-SXM" in assumed


def test_a_setting_that_the_policy_lacks_has_no_default():
    schedule, assumed = followed("vllm", policy="orca")
    assert schedule.control.of_kind("tokens") is None and schedule.control.prefills_per_step == 1
    assert "prefills_per_step: 1, as in the Orca paper" in assumed and schedule.admission == "reserve"


@pytest.mark.parametrize(("cluster", "tokens"), [("1xB200", 16384), ("1xH100-SXM", 8192), ("1xL40S", 4096)])
def test_sglangs_chunks_go_by_memory(cluster, tokens):
    defaults = engine_defaults("sglang", parse_cluster(cluster))
    assert (defaults.engine, defaults.max_num_batched_tokens) == ("sglang", tokens)
    assert (defaults.admission, defaults.prefix_caching) == ("grow", True)


def test_sglangs_share_is_of_weights_keys_and_values():
    """84 % of 79.19 GiB less 14.96 GiB of weights, whatever an iteration computes."""
    for tokens in (512, 8192):
        schedule, _ = followed("sglang", max_num_batched_tokens=tokens, max_num_seqs=256)
        held = schedule.kv_blocks * 16 * schedule.model.spec.kv_bytes(1, "bf16") * 32 / 2**30
        assert held == pytest.approx(0.84 * 79.19 - 14.96, abs=0.02)


def test_a_policy_that_the_engine_lacks_has_no_defaults_of_it():
    schedule, _ = followed("vllm", policy="orca")
    assert (schedule.admission, schedule.cluster.memory_fraction) == ("reserve", 0.9)
