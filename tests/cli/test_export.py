"""Schedules as another engine's flags: names and values that vLLM 0.19 accepts."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exegpt.builtin_models import builtin_model
from exegpt.cli.export import export
from exegpt.cluster import parse_cluster
from exegpt.errors import InputError
from exegpt.schedule import Stage
from exegpt.workload import Workload, task
from tests.exegpt.nouns import schedule
from xprofiler.roofline import roofline_profile
from xscheduler.tune import POLICIES, tune

LLAMA = builtin_model("llama-3.1-8b")
SWITCHES = ("--enable-chunked-prefill", "--no-enable-chunked-prefill")


def flags(made):
    """The flags of a command line, and what it says is lost."""
    command, lost = export(made, "vllm")
    words = command.split()
    assert words[:2] == ["vllm", "serve"] and words[3] in SWITCHES and lost
    assert len(words[4:]) % 2 == 0
    return {**dict(zip(words[4::2], words[5::2], strict=True)), "chunked": words[3] == SWITCHES[0]}, lost


def check(made):
    """What vLLM checks of its arguments when it starts."""
    given, _ = flags(made)
    number = {name: int(given[f"--{name}"]) for name in INTEGERS}
    assert min(number.values()) >= 1
    assert number["max-num-batched-tokens"] >= number["max-num-seqs"]
    assert given["chunked"] or number["max-num-batched-tokens"] >= number["max-model-len"]
    assert number["max-model-len"] <= made.model.spec.context
    assert number["max-model-len"] <= (number["num-gpu-blocks-override"] - 1) * number["block-size"]
    assert number["block-size"] in (1, 8, 16, 32, 64, 128, 256)
    assert made.model.spec.heads % number["tensor-parallel-size"] == 0
    assert number["pipeline-parallel-size"] <= made.model.spec.layers
    devices = number["tensor-parallel-size"] * number["pipeline-parallel-size"] * number["data-parallel-size"]
    assert devices == sum(stage.tp for stage in made.stages) * made.replicas
    assert given["--dtype"] in ("auto", "half", "float16", "bfloat16", "float", "float32")
    assert given["--kv-cache-dtype"] in ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
    assert given.get("--quantization", "fp8") == "fp8"
    assert 0 < float(given["--gpu-memory-utilization"]) <= 1
    return given


INTEGERS = (
    "tensor-parallel-size pipeline-parallel-size data-parallel-size max-model-len max-num-seqs "
    "max-num-batched-tokens block-size num-gpu-blocks-override"
).split()


def test_what_the_engine_has_itself_is_passed_on():
    stages = (Stage((0, 1), 2, "both", None, (0, 16)), Stage((2, 3), 2, "both", None, (16, 32)))
    made = schedule("chunked", LLAMA, stages=stages, tp_degree=2, replicas=3, kv_blocks=77, dtype="bf16")
    given, lost = flags(made)
    assert lost == "keys and values are kept in the model's own dtype, not in fp32"
    given, lost = flags(replace(made, kv_dtype="bf16"))
    assert lost == "nothing is lost" and given["chunked"]
    assert given["--max-num-seqs"] == "8" and given["--max-num-batched-tokens"] == "64"
    assert given["--tensor-parallel-size"] == "2" and given["--pipeline-parallel-size"] == "2"
    assert given["--data-parallel-size"] == "3" and given["--dtype"] == "bfloat16"
    assert given["--num-gpu-blocks-override"] == "78"  # one is the engine's own


@pytest.mark.parametrize("policy", ["static", "orca", "rra"])
def test_the_nearest_budget_holds_a_prompt_beside_all_residents(policy):
    given, lost = flags(schedule(policy, LLAMA))
    residents, budget = int(given["--max-num-seqs"]), int(given["--max-num-batched-tokens"])
    assert residents == {"static": 4, "orca": 8, "rra": 9}[policy]
    assert budget > residents and lost != "nothing is lost"


def test_unequal_stages_become_equal_and_that_is_said():
    stages = (Stage((0, 1), 2, "both", None, (0, 20)), *(Stage((i,), 1, "both", None, (i, i + 1)) for i in (2, 3)))
    given, lost = flags(schedule("rra", LLAMA, stages=stages, tp_degree=2, tp_gpus=2))
    assert (given["--tensor-parallel-size"], given["--pipeline-parallel-size"]) == ("2", "2")
    assert "unequal" in lost


def test_eight_bit_weights_are_quantised_as_they_are_loaded():
    given, _ = flags(schedule("chunked", LLAMA, dtype="fp8", kv_dtype="fp8"))
    assert (given["--dtype"], given["--quantization"], given["--kv-cache-dtype"]) == ("auto", "fp8", "fp8")


def test_encoder_decoders_are_refused():
    with pytest.raises(InputError, match="doesn't run encoder-decoders like 't5-11b'"):
        export(schedule("static", builtin_model("t5-11b")), "vllm")


@settings(max_examples=15, deadline=None)
@given(
    model=st.sampled_from(["llama-3.1-8b", "opt-13b", "gpt2"]),
    cluster=st.sampled_from(["1xA40", "4xA40", "2xH100-SXM", "6xA100-80GB"]),
    workload=st.one_of(
        st.sampled_from([task("S"), task("G")]),
        st.builds(Workload.fixed, st.integers(1, 600), st.integers(1, 400)),
    ),
    bound_s=st.sampled_from([None, 0.5, 3.0, 20.0]),
    kv_dtype=st.sampled_from(["fp16", "fp8", "bf16"]),
)
def test_every_schedule_that_a_search_finds_is_accepted(model, cluster, workload, bound_s, kv_dtype):
    spec, where = builtin_model(model), parse_cluster(cluster)
    profile = roofline_profile(spec, where, "fp16")
    found = tune(spec, where, workload, profile, latency_bound_s=bound_s, kv_dtype=kv_dtype, policies=POLICIES)
    for other in found.alternatives:
        if other.schedule:
            given = check(other.schedule)
            if other.policy == "chunked":
                assert int(given["--max-num-batched-tokens"]) == other.schedule.max_num_batched_tokens
                assert int(given["--max-num-seqs"]) == other.schedule.max_num_seqs


def test_a_policy_that_the_engine_lacks_is_told_with_those_that_it_has(exegpt):
    asked = ("tune", "-l", "inf", "-w", "20/10", "-m", "opt-125m", "-c", "2xA40", "--no-advice", "--export", "vllm")
    for policy, told in (("rra", True), ("orca", False)):
        assert ("--policy orca,chunked searches" in exegpt(*asked, "--policy", policy).out) is told
