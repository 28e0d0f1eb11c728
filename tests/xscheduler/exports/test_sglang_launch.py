"""SGLang's launch commands: each flag, read back as the schedule that is exported, with the same figures."""

import pytest

import xsimulator
from benchmarks.exports import FIGURES, Question, read_back
from xcore.errors import InputError
from xscheduler.engine_settings import engine_schedule, resident
from xscheduler.export import Target
from xscheduler.launch_command import read_launch
from xscheduler.settings import find_setting

SGLANG = Target("sglang")


def exported(question, tp=1, stages=None, replicas=1, residents=64, tokens=1000, **how):
    """The export of a schedule of chunked prefill, without a search."""
    setting = find_setting(
        question.model, question.cluster, question.workload, dtype=question.dtype, engine="sglang", **how
    )
    variables = {"max_num_seqs": residents, "max_num_batched_tokens": tokens}
    plan = engine_schedule(setting, "chunked", tp, None, 16, replicas, stages, **variables)
    followed = SGLANG.follows(plan, setting.profile)
    return SGLANG.export(followed, xsimulator.estimate(resident(followed, setting.profile)[0], setting.profile))


def flags(command):
    """The flags with a value of a command line."""
    words = command.split()
    start = words.index("--model-path")
    assert words[start - 3 : start] == ["python", "-m", "sglang.launch_server"]
    assert words[start + 2] == "--enable-mixed-chunk"
    return dict(zip(words[start + 3 :: 2], words[start + 4 :: 2], strict=True))


def how(dtype, kv_dtype):
    return {"dtype": dtype, "kv_dtype": kv_dtype, "engine": "sglang"}


def asked(model="llama-3.1-8b", dtype=None, cluster="8xH100-SXM", workload="512/512"):
    return Question(model, dtype, cluster, workload, engine="sglang")


def test_what_the_engine_has_itself_is_passed_on():
    found = exported(asked(), tp=2, stages=2, replicas=2)
    assert flags(found.text) == {
        "--tp-size": "2",
        "--pp-size": "2",
        "--dp-size": "2",
        "--dtype": "bfloat16",
        "--kv-cache-dtype": "auto",
        "--context-length": "131072",
        "--max-running-requests": "64",
        "--chunked-prefill-size": "1000",
        "--page-size": "1",
        "--mem-fraction-static": "0.84",
    }
    assert found.commands[0].split()[4] == "meta-llama/Llama-3.1-8B"
    assert (found.schedule.admission, found.schedule.prefix_caching, found.estimate.engine) == ("grow", True, "sglang")
    assert flags(exported(asked(), tokens=20_000).text)["--max-prefill-tokens"] == "20000"


def test_a_replica_over_nodes_has_a_command_for_each():
    found = exported(asked(cluster="2x8xH100-SXM"), tp=8, stages=2)
    first, second = found.commands
    assert first.endswith("--nnodes 2 --node-rank 0 --dist-init-addr $NODE0:20000")
    assert second == first.replace("--node-rank 0", "--node-rank 1")
    assert found.notes[0] == "run one command on each of 2 nodes; $NODE0 is the address of the first node"


def test_dtypes_have_the_engines_names():
    options = flags(exported(asked(dtype="fp8"), kv_dtype="fp8").text)
    assert (options["--dtype"], options["--quantization"], options["--kv-cache-dtype"]) == ("auto", "fp8", "fp8_e4m3")
    for dtype, kv_dtype, words in (("bf16", "fp16", "not in fp16: leave out --kv-dtype"), ("int4", None, "to int4")):
        with pytest.raises(InputError, match=words):
            SGLANG.check(find_setting("llama-3.1-8b", "1xH100", "64/64", **how(dtype, kv_dtype)), ("chunked",))


@pytest.mark.parametrize(
    ("model", "cluster", "page", "chunk", "most"),
    [
        ("llama-3.1-8b", "1xB200", "16", "992", "64"),
        ("llama-3.1-8b", "1xH100-SXM", "1", "1000", "64"),
        ("deepseek-ai/DeepSeek-R1", "8xB200", "64", "960", "64"),
        ("deepseek-ai/DeepSeek-R1", "8xH200-SXM", "1", "1000", "64"),
    ],
)
def test_chunks_are_whole_pages_where_attention_needs_pages(model, cluster, page, chunk, most):
    found = exported(asked(model, cluster=cluster), tp=int(cluster[0]))
    options = flags(found.text)
    assert (options["--page-size"], options["--chunked-prefill-size"]) == (page, chunk)
    assert options["--max-running-requests"] == most
    assert found.schedule.control.max_num_batched_tokens == int(chunk)


def test_a_chunk_below_the_sequences_has_fewer_of_them():
    options = flags(exported(asked(cluster="1xB200"), residents=40, tokens=47).text)
    assert (options["--chunked-prefill-size"], options["--max-running-requests"]) == ("32", "32")


QUESTIONS = [
    (asked(), {"tp": 2, "stages": 2, "replicas": 2}),
    (asked("qwen3-32b", cluster="2x4xB200"), {"tp": 4, "stages": 2, "tokens": 300}),
    (asked("llama-3.1-70b", "fp8", "2x8xL40S"), {"tp": 4, "stages": 4}),
    (asked("Qwen/Qwen3-235B-A22B-FP8", cluster="8xH200-SXM"), {"tp": 8}),
    (asked("deepseek-ai/DeepSeek-R1", cluster="2x8xH200-SXM"), {"replicas": 16, "attention_dp": 16}),
    (asked("deepseek-ai/DeepSeek-R1", cluster="16xH200-SXM"), {"replicas": 16, "attention_dp": 8}),
]


@pytest.mark.parametrize(("question", "how"), QUESTIONS, ids=lambda value: getattr(value, "cluster", ""))
def test_a_command_that_is_read_back_has_the_figures_of_the_export(question, how):
    found = exported(question, **how)
    launch = read_launch(found.commands[0])
    assert launch.settings.get("attention_dp", 1) == how.get("attention_dp", 1)
    simulated = read_back(question, found)
    pairs = [(getattr(simulated, name), getattr(found.estimate, name)) for name in FIGURES]
    assert all(got == pytest.approx(said, rel=1e-6) for got, said in pairs) and found.estimate.throughput_seq_s > 0


def test_replicas_that_share_experts_have_the_limits_of_all_of_them():
    question = asked("deepseek-ai/DeepSeek-R1", cluster="16xH200-SXM")
    found = exported(question, replicas=16, attention_dp=8)
    options = flags(found.text)
    assert (options["--tp-size"], options["--attn-dp-size"], options["--ep-size"]) == ("8", "8", "8")
    assert (options["--max-running-requests"], options["--chunked-prefill-size"]) == ("512", "8000")
    assert "--dp-size" not in options and found.notes[0].startswith(
        "start 2 of it, at most 2 on a node and each with 8"
    )


def test_experts_are_whole_where_a_part_has_no_whole_blocks_of_scales():
    for tp, whole in ((4, False), (8, True)):
        options = flags(exported(asked("Qwen/Qwen3-235B-A22B-FP8", cluster="8xH200-SXM"), tp=tp).text)
        assert options.get("--ep-size") == ("8" if whole else None)
