"""The data sheet's experts, latent attention and weights of few bits: limits, orders, and what others measured."""

from dataclasses import replace

import numpy as np
import pytest

from xcore.errors import InputError
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xprofiler.roofline import roofline_profile
from xprofiler.roofline_device import arithmetic

H100 = parse_cluster("8xH100-SXM")
A100 = parse_cluster("8xA100-80GB")


def rest(model, dtype, tp, tokens, cluster=H100):
    return roofline_profile(model, cluster, dtype, (tp,)).degree(tp).decoder.rest.at(tokens)


def with_experts(model, **changes):
    return replace(model, experts=replace(model.experts, **changes))


def test_a_token_reads_its_own_experts_and_a_large_batch_all():
    qwen, device = builtin_model("qwen3-235b-a22b"), H100.device
    expert_bytes = 3 * qwen.hidden * qwen.experts.ffn
    for tokens, read in ((1, 8), (4096, 128)):
        least = read * expert_bytes / device.bandwidth_bytes_s
        assert rest(qwen, "fp8", 1, tokens) > least
    assert rest(qwen, "fp8", 1, 1) < 128 * expert_bytes / device.bandwidth_bytes_s  # a dense layer of all experts


def test_it_is_no_dense_model_with_the_active_parameters():
    """At 16 tokens most experts are read: several times what one token's experts have."""
    qwen = builtin_model("qwen3-235b-a22b")
    dense = replace(qwen, experts=None, ffn=qwen.experts.per_token * qwen.experts.ffn)
    assert rest(qwen, "fp8", 1, 16) > 3 * rest(dense, "fp8", 1, 16)


@pytest.mark.parametrize("name", ["qwen3-235b-a22b", "gpt-oss-120b", "deepseek-v3", "llama-4-maverick", "mixtral-8x7b"])
def test_more_tokens_never_take_less_and_more_devices_never_more(name):
    model = builtin_model(name)
    dtype = "bf16" if name.startswith(("mixtral", "llama")) else model.dtype
    times = [[rest(model, dtype, tp, tokens) for tokens in (1, 16, 256, 4096, 65536)] for tp in (1, 4)]
    assert all(np.diff(row).min() >= 0 for row in times)
    assert times[1][-1] < times[0][-1]


def test_uneven_loads_read_less_but_fill_one_rank_more():
    qwen = builtin_model("qwen3-30b-a3b")
    even, uneven = (with_experts(qwen, skew=skew) for skew in (0.0, 1.2))
    assert rest(uneven, "bf16", 1, 16) < rest(even, "bf16", 1, 16)
    whole = [with_experts(model, expert_parallel=True) for model in (even, uneven)]
    assert rest(whole[1], "bf16", 8, 8192) > rest(whole[0], "bf16", 8, 8192)
    assert rest(whole[0], "bf16", 8, 8192) < rest(even, "bf16", 8, 8192)  # each moves the rows of its experts alone


def test_parts_of_experts_keep_their_scales_together():
    qwen = builtin_model("qwen3-235b-a22b")  # 1536 wide: eight parts have 192, no multiple of 128
    assert not qwen.expert_parallel(4, "fp8") and qwen.expert_parallel(8, "fp8") and not qwen.expert_parallel(8, "bf16")


def test_latent_attention_reads_one_vector_for_all_heads():
    deepseek, device = builtin_model("deepseek-v3"), parse_cluster("8xH200-SXM").device
    profile = roofline_profile(deepseek, parse_cluster("8xH200-SXM"), "fp8", (1, 8))
    one, eight = (profile.degree(tp).decoder.decode_attention.at(64, 8192) for tp in (1, 8))
    read = 64 * 8191 * 576 * 2 / device.bandwidth_bytes_s
    assert one > eight > read  # fewer heads compute less, but every device reads all of it
    computed = 2 * 64 * 8192 * 128 * (2 * 512 + 64) / device.flops_s["bf16"]
    assert one > max(read, computed)


def test_sparse_attention_stops_growing_but_for_its_index():
    glm = builtin_model("glm-5")
    whole = replace(glm, latent=replace(glm.latent, index=None))
    sparse, dense = (
        roofline_profile(model, H100, "fp8", (8,)).degree(8).decoder.decode_attention for model in (glm, whole)
    )
    assert sparse.at(16, 1024) >= dense.at(16, 1024)
    assert sparse.at(16, 32768) < 0.5 * dense.at(16, 32768)


def test_weights_of_few_bits_are_converted_where_a_device_does_not_compute_in_them():
    llama = builtin_model("llama-3.1-70b")
    assert arithmetic(A100.device, "fp8") == arithmetic(A100.device, "int4") == "bf16"
    assert arithmetic(H100.device, "fp8") == "fp8"
    few, many = ([rest(llama, dtype, 8, tokens, A100) for dtype in ("int4", "bf16")] for tokens in (1, 8192))
    assert few[0] < 0.6 * few[1]  # reads a quarter of the weights
    assert many[0] == pytest.approx(many[1], rel=0.05)  # computes at the same rate
    with pytest.raises(InputError, match="has no rate for fp32"):
        roofline_profile(llama, replace(A100, device=replace(A100.device, flops_s={"fp16": 1e14})), "fp32", (8,))


@pytest.mark.parametrize(
    ("model", "system", "engine", "tp", "most"),
    [("minimax-m2.5", "h200_sxm", "vllm", 8, 0.15), ("gpt-oss-120b", "h200_sxm", "vllm", 2, 0.12)],
)
def test_time_per_token_is_near_what_was_measured(model, system, engine, tp, most):
    pytest.importorskip("aiconfigurator_core", reason="aiconfigurator-core holds the measurements")
    from benchmarks.silicon_experts import errors, predict, read

    wanted = model, system, engine
    ((group, measured),) = (one for one in read()[0].items() if (one[0].model, one[0].system, one[0].engine) == wanted)
    rows = [row for row in measured if row.served.tp == tp and not row.expert_parallel][::6]
    assert len(rows) >= 3 and np.abs(errors(rows, predict(group, rows, "data sheet"))[:, 1]).mean() < most


def test_shared_experts_are_stored_once_and_attention_in_each():
    deepseek = builtin_model("deepseek-v3")
    shared = with_experts(deepseek, attention_dp=8)
    layers = 8 * shared.layer_bytes(1, "fp8")
    assert layers == pytest.approx(deepseek.layer_bytes(1, "fp8") + 7 * deepseek.dense_parameters)
    assert shared.checkpoint_bytes("fp8") == deepseek.checkpoint_bytes("fp8")
    assert shared.tp_degrees(8) == (1,) and shared.expert_parallel(1, "fp8")
    with pytest.raises(InputError, match="can't be shared evenly by 7 devices"):
        with_experts(deepseek, attention_dp=7)


def test_latent_attention_for_own_sequences_holds_more_and_decodes_more():
    """Under tensor parallelism every device keeps all keys and values of a latent cache."""
    from xcore.specs.workload import Workload
    from xscheduler.engine_settings import engine_schedule
    from xscheduler.settings import Setting
    from xsimulator.estimates import estimate

    cluster, deepseek = parse_cluster("8xH200-SXM"), builtin_model("deepseek-v3")
    kept, rates = [], []
    for model, tp, replicas in ((deepseek, 8, 1), (with_experts(deepseek, attention_dp=8), 1, 8)):
        profile = roofline_profile(model, cluster, "fp8", (tp,))
        setting = Setting(model, cluster, Workload.fixed(1024, 512), profile, "bf16", ())
        limits = {"max_num_seqs": 512 // replicas, "max_num_batched_tokens": 4096 // replicas}
        schedule = engine_schedule(setting, "chunked", tp, None, 16, replicas, **limits)
        kept.append(schedule.kv_blocks * schedule.replicas)
        rates.append(estimate(schedule, profile).throughput_seq_s)
    assert kept[1] > 3 * kept[0]
    assert rates[1] > 1.3 * rates[0]


def test_published_throughputs_of_attention_data_parallelism():
    from benchmarks.published import FILE
    from benchmarks.published_all import published

    if not FILE.exists():
        pytest.skip(f"public data are not here: {FILE}")
    rows = [row for row in published() if row.group == ("DeepSeek-R1-0528", "B200", "fp4") and row.attention_dp == 4]
    assert rows and max(abs(row.error()) for row in rows) < 0.2


def test_imported_tables_are_refused_for_what_they_do_not_have(tmp_path):
    from xprofiler.layer_folder import layers_profile
    from xprofiler.vidur import vidur_profile

    mixture, windows = "8 experts, 2 per token", "a window of 1,024 tokens in 29 of 34"
    for name, what, imported, why in (
        ("mixtral-8x7b", mixture, vidur_profile, "imported tables don't cover"),
        ("gemma-3-4b", windows, vidur_profile, "imported tables don't cover"),
        ("gemma-3-4b", windows, layers_profile, "folders of layers don't describe"),
    ):
        with pytest.raises(InputError, match=f"{what}.*{why}"):
            imported(builtin_model(name), tmp_path)
