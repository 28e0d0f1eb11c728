"""TensorRT-LLM's launch commands: the keys of the file, read back as the schedule, with the same figures."""

import pytest
import yaml

import xsimulator
from benchmarks.exports import FIGURES, Question, read_back
from xcore.errors import InputError
from xscheduler.engine_settings import engine_schedule, resident
from xscheduler.export import Target
from xscheduler.settings import find_setting

TARGET = Target("tensorrt-llm")
FIELDS = {
    "": {
        *("tensor_parallel_size", "pipeline_parallel_size", "pp_partition", "moe_expert_parallel_size", "dtype"),
        *("enable_attention_dp", "gpus_per_node", "max_batch_size", "max_num_tokens", "max_seq_len"),
        *("enable_chunked_prefill", "scheduler_config", "kv_cache_config"),
    },
    "scheduler_config": {"capacity_scheduler_policy"},
    "kv_cache_config": {"dtype", "free_gpu_memory_fraction", "tokens_per_block", "enable_block_reuse"},
}
"""Fields of `LlmArgs`, `SchedulerConfig` and `KvCacheConfig`, among others that they have.

Read in tensorrt_llm/llmapi/llm_args.py of NVIDIA/TensorRT-LLM@00043967 (1.3), not in the package: PyPI has no wheel.
"""


def asked(model="llama-3.1-8b", dtype=None, cluster="8xH100-SXM", workload="512/512"):
    return Question(model, dtype, cluster, workload, engine="tensorrt-llm")


def exported(question, tp=1, stages=None, replicas=1, residents=64, tokens=1000, **how):
    """The export of a schedule of chunked prefill, without a search."""
    setting = find_setting(
        question.model, question.cluster, question.workload, dtype=question.dtype, engine="tensorrt-llm", **how
    )
    variables = {"max_num_seqs": residents, "max_num_batched_tokens": tokens}
    plan = engine_schedule(setting, "chunked", tp, None, 16, replicas, stages, **variables)
    followed = TARGET.follows(plan, setting.profile)
    return TARGET.export(followed, xsimulator.estimate(resident(followed, setting.profile)[0], setting.profile))


def config(found):
    """The content of the file that the command reads."""
    ((name, text),) = found.start.files.items()
    assert f"--config {name}" in found.commands[0] and f"cat > {name} <<'EOF'\n{text}EOF\n" in found.text
    return yaml.safe_load(text)


def test_the_file_has_what_the_engine_has_itself():
    found = exported(asked(), tp=2, stages=2, replicas=2)
    assert found.commands == ("trtllm-serve meta-llama/Llama-3.1-8B --config trtllm.yaml",)
    assert config(found) == {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "dtype": "bfloat16",
        "max_batch_size": 64,
        "max_num_tokens": 1000,
        "max_seq_len": 131072,
        "enable_chunked_prefill": True,
        "scheduler_config": {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"},
        "kv_cache_config": {
            "dtype": "auto",
            "free_gpu_memory_fraction": 0.9,
            "tokens_per_block": 32,
            "enable_block_reuse": True,
        },
    }
    assert found.notes[0].startswith("start 2 of it, at most 2 on a node and each with 4 of its GPUs")
    assert (found.schedule.admission, found.schedule.block_size) == ("reserve", 32)


def test_a_replica_over_nodes_is_one_command_of_mpi():
    found = exported(asked(cluster="2x8xH100-SXM"), tp=8, stages=2)
    command = "mpirun -n 16 -H $NODE0:8,$NODE1:8 trtllm-llmapi-launch trtllm-serve meta-llama/Llama-3.1-8B"
    assert found.commands == (f"{command} --config trtllm.yaml",) and config(found)["gpus_per_node"] == 8
    assert found.notes[0].startswith("run it on the first of 2 nodes; $NODE0 to $NODE1 are their addresses")


def test_weights_are_never_converted():
    for dtype, kv_dtype, words in (("fp8", None, "doesn't convert weights to fp8"), ("bf16", "fp16", "not in fp16")):
        setting = find_setting("llama-3.1-8b", "1xH100", "64/64", dtype=dtype, kv_dtype=kv_dtype, engine="tensorrt-llm")
        with pytest.raises(InputError, match=words):
            TARGET.check(setting, ("chunked",))


@pytest.mark.parametrize(
    ("question", "how"),
    [
        (asked(), {"tp": 2, "stages": 2, "replicas": 2}),
        (asked("qwen3-32b", cluster="2x4xB200"), {"tp": 4, "stages": 2, "tokens": 300, "kv_dtype": "fp8"}),
        (asked("Qwen/Qwen3-235B-A22B-FP8", cluster="8xH200-SXM"), {"tp": 8}),
        (asked("Qwen/Qwen3-235B-A22B-FP8", cluster="8xH200-SXM"), {"tp": 2, "stages": 4}),
        (asked("deepseek-ai/DeepSeek-R1", cluster="2x8xH200-SXM"), {"replicas": 16, "attention_dp": 16}),
        (asked("deepseek-ai/DeepSeek-R1", cluster="16xH200-SXM"), {"replicas": 16, "attention_dp": 8}),
    ],
    ids=lambda value: getattr(value, "cluster", ""),
)
def test_a_file_that_is_read_back_has_the_figures_of_the_export(question, how):
    found = exported(question, **how)
    written = config(found)
    for inside, fields in FIELDS.items():
        assert (written[inside] if inside else written).keys() <= fields
    simulated = read_back(question, found)
    pairs = [(getattr(simulated, name), getattr(found.estimate, name)) for name in FIGURES]
    assert all(got == pytest.approx(said, rel=1e-6) for got, said in pairs) and found.estimate.throughput_seq_s > 0
