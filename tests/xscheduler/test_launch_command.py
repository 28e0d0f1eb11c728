"""Launch commands of servers as settings: what is read, what is named, what is refused."""

import pytest

from xcore.errors import InputError
from xscheduler.launch_command import read_launch


def test_vllms_words():
    launch = read_launch(
        "CUDA_VISIBLE_DEVICES=0,1 vllm serve meta-llama/Llama-3.1-8B --tensor-parallel-size 2 -dp=2 --max_num_seqs=64 "
        "\\\n --max-num-batched-tokens 4096 --kv-cache-dtype fp8 --gpu-memory-utilization 0.8 --block-size 32 "
        "--no-enable-prefix-caching --max-model-len 8192 --port 9000 --dtype bfloat16 --trust-remote-code"
    )
    assert (launch.engine, launch.model, launch.longest) == ("vllm", "meta-llama/Llama-3.1-8B", 8192)
    assert launch.settings == {
        "tp_degree": 2,
        "replicas": 2,
        "stages": 1,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 4096,
        "kv_dtype": "fp8",
        "memory_fraction": 0.8,
        "block_size": 32,
        "prefix_caching": False,
        "dtype": "bf16",
    }
    assert launch.unmodelled == ("--port", "--trust-remote-code")
    assert read_launch("vllm serve m --dtype bfloat16 --quantization fp8").settings["dtype"] == "fp8"
    assert read_launch("vllm serve m --quantization awq_marlin").settings["dtype"] == "int4"
    assert "dtype" not in read_launch("vllm serve m -q compressed-tensors").settings  # as the checkpoint says


def test_sglangs_words():
    launch = read_launch(
        "python3 -m sglang.launch_server --model-path Qwen/Qwen3-8B --tp 4 --dp-size 2 --max-running-requests 128 "
        "--chunked-prefill-size 8192 --mem-fraction-static 0.85 --disable-radix-cache --context-length 32768"
    )
    assert (launch.engine, launch.model, launch.longest) == ("sglang", "Qwen/Qwen3-8B", 32768)
    assert launch.settings["max_num_seqs"] == 128 and launch.settings["max_num_batched_tokens"] == 8192
    assert (launch.settings["tp_degree"], launch.settings["replicas"]) == (4, 2)
    assert launch.settings["memory_fraction"] == 0.85 and launch.settings["prefix_caching"] is False


@pytest.mark.parametrize(
    "sharing", ["--attn-dp-size 8", "--attention-data-parallel-size=8", "--dp-size 8 --enable-dp-attention"]
)
def test_sglangs_sizes_of_replicas_that_share_experts_are_those_of_all_together(sharing):
    launch = read_launch(
        f"python -m sglang.launch_server --model m --tp 8 --ep 8 {sharing} --max-running-requests 256 "
        "--chunked-prefill-size 32768"
    )
    assert launch.settings == {
        "tp_degree": 1,
        "replicas": 8,
        "stages": 1,
        "attention_dp": 8,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 4096,
    }


def test_sglangs_chunks_are_at_most_a_prefill():
    command = "python -m sglang.launch_server --model m --tp 4 --ep-size 4 --chunked-prefill-size 32768"
    read = read_launch(command).settings
    assert read["max_num_batched_tokens"] == 16_384 and read["expert_parallel"] is True
    assert read_launch(f"{command} --max-prefill-tokens 40000").settings["max_num_batched_tokens"] == 32_768


def test_tensorrt_llms_file_has_settings_too(tmp_path):
    path = tmp_path / "trtllm.yaml"
    path.write_text(
        "tensor_parallel_size: 8\nmoe_expert_parallel_size: 8\nenable_attention_dp: true\nmax_num_tokens: 4096\n"
        "kv_cache_config: {dtype: fp8, free_gpu_memory_fraction: 0.85, tokens_per_block: 64,\n"
        "  enable_block_reuse: false}\n"
        "scheduler_config: {capacity_scheduler_policy: MAX_UTILIZATION}\n"
    )
    launch = read_launch(f"mpirun -n 8 trtllm-llmapi-launch trtllm-serve m --config {path} --max_batch_size 64")
    assert (launch.engine, launch.model, launch.longest) == ("tensorrt-llm", "m", None)
    assert launch.settings == {
        "tp_degree": 1,
        "attention_dp": 8,
        "replicas": 8,
        "stages": 1,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 4096,
        "kv_dtype": "fp8",
        "memory_fraction": 0.85,
        "block_size": 64,
        "prefix_caching": False,
        "admission": "grow",
    }
    assert "without enable_chunked_prefill" in launch.notes[0]
    path.write_text("- 1\n")
    with pytest.raises(InputError, match="has no keys"):
        read_launch(f"trtllm-serve m --extra_llm_api_options={path}")


def test_sglang_mixes_prompts_with_decoding_only_where_it_says_so():
    command = "python -m sglang.launch_server --model m"
    mixed, alone = read_launch(f"{command} --enable-mixed-chunk"), read_launch(command)
    assert mixed.settings["policy"] == "chunked" and mixed.notes == ()
    assert "policy" not in alone.settings and "without --enable-mixed-chunk" in alone.notes[0]
    assert read_launch("vllm serve m --port 1").notes == ("flags that do not change this prediction: --port",)


def test_the_layers_of_pipeline_stages_are_a_variable_of_vllm():
    launch = read_launch("VLLM_PP_LAYER_PARTITION=17,15 vllm serve m -pp 2")
    assert (launch.settings["layers"], launch.settings["stages"]) == ((17, 15), 2)
    command = "python -m sglang.launch_server --model m --pp-size 2"
    assert read_launch(f"SGLANG_PP_LAYER_PARTITION=17,15 {command}").settings["layers"] == (17, 15)
    assert "layers" not in read_launch(f"VLLM_PP_LAYER_PARTITION=17,15 {command}").settings


def test_what_isnt_said_is_one_device():
    assert read_launch("vllm serve m").settings == {"tp_degree": 1, "replicas": 1, "stages": 1}
    assert read_launch("vllm serve --model m --dtype auto").settings == {"tp_degree": 1, "replicas": 1, "stages": 1}


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("lmdeploy serve m", "is not a command of vLLM, SGLang or TensorRT-LLM"),
        ("", "is not a command of vLLM, SGLang or TensorRT-LLM"),
        ("trtllm-serve m --config missing.yaml", "There is no TensorRT-LLM configuration file"),
        ("trtllm-serve m --max_beam_width 4", "--max_beam_width, which is not modelled for TensorRT-LLM"),
        ("vllm serve", "names no model: write `vllm serve MODEL"),
        ("sglang serve", "names no model: write `sglang serve --model-path MODEL"),
        ("vllm serve 'm", "close its quotes"),
        ("vllm serve m --enforce-eager", "--enforce-eager, which is not modelled for vLLM"),
        ("vllm serve m --speculative-config {}", 'which isn\'t JSON with "num_speculative_tokens"'),
        (
            """vllm serve m --speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'""",
            "which isn't a modelled method: draft_model, mtp",
        ),
        ("sglang serve --model m --speculative-algorithm NGRAM", "NGRAM, which is not modelled: use one of EAGLE"),
        ("sglang serve --model m --speculative-eagle-topk 4", "4, which isn't 1: trees of drafts are not modelled"),
        (
            "sglang serve --model m --speculative-algorithm EAGLE --speculative-num-steps 3 "
            "--speculative-num-draft-tokens 8",
            "verifies 8 draft tokens with 3 draft steps",
        ),
        ("vllm serve m --no-enable-chunked-prefill", "--no-enable-chunked-prefill, which is not modelled for vLLM"),
        ("vllm serve m --max-num-seqs many", "--max-num-seqs many, which isn't a whole number above 0"),
        ("vllm serve m --max-num-seqs ²", "--max-num-seqs ², which isn't a whole number above 0"),
        ("vllm serve m --gpu-memory-utilization 90", "isn't a share above 0 and at most 1"),
        ("vllm serve m --gpu-memory-utilization x", "x, which isn't a share above 0 and at most 1"),
        ("vllm serve m --enable-prefix-caching=False", "--enable-prefix-caching takes no value"),
        ("vllm serve m --trust_remote_code=true", "--trust-remote-code takes no value"),
        ("python -m sglang.launch_server --model m --disable-radix-cache=0", "--disable-radix-cache takes no value"),
        ("vllm serve m --quantization gguf", "isn't one of fp8"),
        (
            "python -m sglang.launch_server --model m --tp 8 --attn-dp-size 3",
            "8 devices (the tensor-parallel size) among 3",
        ),
        ("python -m sglang.launch_server --model m --tp 8 --ep 4", "size of 4 on 8 devices"),
        ("python -m sglang.launch_server --model m --tp 8 --attn-dp-size 8", "without an expert-parallel size"),
        ("vllm serve m --max-num-seqs", "ends with --max-num-seqs, but this flag needs a value"),
        ("vllm serve m -tp 2 --tensor-parallel-size 4", "sets --tensor-parallel-size twice, to 2 and to 4"),
        ("VLLM_PP_LAYER_PARTITION=9,9,14 vllm serve m -pp 2", "PARTITION=9,9,14, but 2 pipeline stages"),
        (
            "VLLM_PP_LAYER_PARTITION=9,x vllm serve m -pp 2",
            "9,x, which isn't whole numbers above 0, separated by commas",
        ),
        ("vllm serve m -tp 2 n", "sets the model twice, to m and to n"),
    ],
)
def test_what_cant_be_simulated_is_refused_by_name(command, said):
    with pytest.raises(InputError) as error:
        read_launch(command)
    assert said in str(error.value)


def test_replicas_that_share_experts_are_attention_data_parallel():
    launch = read_launch("vllm serve deepseek-ai/DeepSeek-R1 --data-parallel-size 8 --enable-expert-parallel")
    assert launch.settings["attention_dp"] == launch.settings["replicas"] == 8
    assert "expert_parallel" not in launch.settings
    alone = read_launch("vllm serve Qwen/Qwen3-235B-A22B-FP8 -tp 8 --enable-expert-parallel").settings
    assert alone["expert_parallel"] and "attention_dp" not in alone
