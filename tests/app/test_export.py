"""Schedules as another engine's flags: names and values that vLLM 0.33 accepts."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exegpt.app.export import export
from exegpt.app.settings import find_setting
from exegpt.builtin_models import builtin_model
from exegpt.cluster import parse_cluster
from exegpt.errors import InputError
from exegpt.schedule import Stage
from exegpt.workload import Workload, task
from tests.exegpt.nouns import schedule
from xprofiler.roofline import roofline_profile
from xscheduler.tune import POLICIES, tune

LLAMA = builtin_model("llama-3.1-8b")
SWITCHES = ("--enable-chunked-prefill", "--no-enable-chunked-prefill")


def flags(plan):
    """The flags of a command line, and its note on what is lost."""
    commands, lost = export(plan, "vllm")
    words = commands.splitlines()[0].split()
    assert words[:2] == ["vllm", "serve"] and words[3] in SWITCHES and lost
    assert words[4] == f"--{'' if plan.prefix_caching else 'no-'}enable-prefix-caching" and len(words[5:]) % 2 == 0
    options = dict(zip(words[5::2], words[6::2], strict=True))
    assert options.keys() <= set(KNOWN)
    return {**options, "chunked": words[3] == SWITCHES[0]}, lost


def check(plan):
    """What vLLM checks of its arguments when it starts."""
    options, _ = flags(plan)
    number = {name: int(options[f"--{name}"]) for name in INTEGERS}
    assert min(number.values()) >= 1
    assert number["max-num-batched-tokens"] >= number["max-num-seqs"]
    assert options["chunked"] or number["max-num-batched-tokens"] >= number["max-model-len"]
    assert number["max-model-len"] <= plan.model.spec.context
    assert number["block-size"] in (1, 8, 16, 32, 64, 128, 256)
    assert plan.model.spec.heads % number["tensor-parallel-size"] == 0
    assert number["pipeline-parallel-size"] <= plan.model.spec.layers
    devices = number["tensor-parallel-size"] * number["pipeline-parallel-size"] * number["data-parallel-size"]
    nodes = int(options.get("--nnodes", 1))
    assert devices <= plan.cluster.devices and devices <= nodes * plan.cluster.devices_per_node
    assert options["--dtype"] in ("auto", "half", "float16", "bfloat16", "float", "float32")
    assert options["--kv-cache-dtype"] in ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
    assert options.get("--quantization", "fp8") == "fp8"
    assert 0 < float(options["--gpu-memory-utilization"]) <= 1
    return options


INTEGERS = (
    "tensor-parallel-size pipeline-parallel-size data-parallel-size max-model-len max-num-seqs "
    "max-num-batched-tokens block-size"
).split()
KNOWN = (  # vllm/engine/arg_utils.py of 0.33.0
    "--tensor-parallel-size --pipeline-parallel-size --data-parallel-size --dtype --quantization --kv-cache-dtype "
    "--max-model-len --max-num-seqs --max-num-batched-tokens --block-size --gpu-memory-utilization --nnodes "
    "--master-addr --node-rank --headless"
).split()


def test_what_the_engine_has_itself_is_passed_on():
    stages = (Stage((0, 1), 2, "both", None, (0, 16)), Stage((2, 3), 2, "both", None, (16, 32)))
    more = {"stages": stages, "tp_degree": 2, "replicas": 2, "kv_blocks": 77, "dtype": "bf16"}
    chunked = schedule("chunked", LLAMA, cluster=parse_cluster("8xA40"), **more)
    options, lost = flags(chunked)
    assert lost == "keys and values are kept in the model's own dtype, not in fp32"
    flags(replace(chunked, prefix_caching=True))
    options, lost = flags(replace(chunked, kv_dtype="bf16"))
    assert lost == "nothing is lost" and options["chunked"]
    assert options["--max-num-seqs"] == "8" and options["--max-num-batched-tokens"] == "64"
    assert options["--tensor-parallel-size"] == "2" and options["--pipeline-parallel-size"] == "2"
    assert options["--data-parallel-size"] == "2" and options["--dtype"] == "bfloat16"


def pipeline(cluster, tp, stages, replicas=1, **more):
    layers = LLAMA.layers // stages
    cut = tuple(
        Stage(tuple(range(i * tp, i * tp + tp)), tp, "both", None, (i * layers, i * layers + layers))
        for i in range(stages)
    )
    fields = {"stages": cut, "replicas": replicas, "dtype": "bf16", "kv_dtype": "bf16"}
    return schedule("chunked", LLAMA, cluster=parse_cluster(cluster), **fields | more)


def test_a_replica_over_nodes_has_a_command_for_each():
    commands, lost = export(pipeline("2x8xH100-SXM", 8, 2), "vllm")
    first, second = commands.splitlines()
    assert "--tensor-parallel-size 8 --pipeline-parallel-size 2" in first
    assert first.endswith("--nnodes 2 --master-addr $NODE0 --node-rank 0")
    assert second == first[:-1] + "1 --headless"
    assert lost == "run one command on each of 2 nodes, $NODE0 the first one's address"
    _, lost = export(pipeline("4x8xH100-SXM", 8, 2, replicas=2), "vllm")
    assert lost.startswith("for each of the 2 replicas run one command on each of 2 nodes")


def test_replicas_on_several_nodes_are_started_on_each():
    commands, lost = export(pipeline("2x8xH100-SXM", 2, 1, replicas=8), "vllm")
    assert "--data-parallel-size 4 " in commands and "--nnodes" not in commands
    assert lost == "run it on each of 2 nodes behind a load balancer"


def test_a_schedule_with_more_cache_than_the_engine_has_is_named():
    """vLLM sizes its cache itself: 8B leave 49.6 GiB of an H100, for steps of 512 tokens and 1,024 sequences."""
    commands, lost = export(pipeline("1xH100-SXM", 1, 1), "vllm")
    assert "num-gpu-blocks" not in commands and lost == "nothing is lost"
    blocks = int(56 * 2**30 / (16 * 32 * LLAMA.kv_bytes(1, "bf16")))
    commands, lost = export(pipeline("1xH100-SXM", 1, 1, kv_blocks=blocks), "vllm")
    assert "num-gpu-blocks" not in commands and "--gpu-memory-utilization 0.9" in commands
    assert lost.endswith("tokens with these flags, and the schedule's 458,752: it preempts sequences")


@pytest.mark.parametrize("fraction", [0.92, 0.86, 0.84])
def test_what_is_found_for_an_engine_fits_its_cache_at_any_share_of_the_memory(fraction):
    """Weights of 61 of 79 GiB: the search leaves the engine its part, so that no advice to leave more follows."""
    setting = find_setting("qwen3-32b", "1xH100-SXM", "1024/128", memory_fraction=fraction)
    answer = tune(
        *(setting.model, setting.cluster, setting.workload, setting.profile),
        kv_dtype=setting.kv_dtype,
        policies=("chunked",),
    )
    commands, lost = export(answer.schedule, "vllm")
    assert f"--gpu-memory-utilization {fraction}" in commands and lost == "nothing is lost"


@pytest.mark.parametrize("policy", ["static", "orca", "rra"])
def test_the_nearest_budget_holds_a_prompt_beside_all_residents(policy):
    options, lost = flags(schedule(policy, LLAMA))
    residents, budget = int(options["--max-num-seqs"]), int(options["--max-num-batched-tokens"])
    assert residents == {"static": 4, "orca": 8, "rra": 9}[policy]
    assert budget > residents and lost != "nothing is lost"


def test_prompts_are_spread_over_the_iterations_that_decode_something():
    """After 6 iterations nothing is left of outputs of 6 tokens, however many iterations a phase may have."""
    budgets = []
    for iterations in (6, 600):
        varied = schedule("rra", LLAMA, workload=Workload.fixed(600, 6), encode_batch=8, decode_batch=8)
        options, _ = flags(replace(varied, decode_iterations=iterations))
        budgets.append(int(options["--max-num-batched-tokens"]))
    assert budgets == [8 + 800, 8 + 800]


def test_unequal_stages_become_equal_with_a_note():
    stages = (Stage((0, 1), 2, "both", None, (0, 20)), *(Stage((i,), 1, "both", None, (i, i + 1)) for i in (2, 3)))
    options, lost = flags(schedule("rra", LLAMA, stages=stages, tp_degree=2, tp_gpus=2))
    assert (options["--tensor-parallel-size"], options["--pipeline-parallel-size"]) == ("2", "2")
    assert "unequal" in lost


def test_eight_bit_weights_are_quantised_as_they_are_loaded():
    options, _ = flags(schedule("chunked", LLAMA, dtype="fp8", kv_dtype="fp8"))
    assert (options["--dtype"], options["--quantization"], options["--kv-cache-dtype"]) == ("auto", "fp8", "fp8")


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
    answer = tune(spec, where, workload, profile, latency_bound_s=bound_s, kv_dtype=kv_dtype, policies=POLICIES)
    for other in answer.alternatives:
        if other.schedule:
            options = check(other.schedule)
            if other.policy == "chunked":
                assert int(options["--max-num-batched-tokens"]) == other.schedule.max_num_batched_tokens
                assert int(options["--max-num-seqs"]) == other.schedule.max_num_seqs
