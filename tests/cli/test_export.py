"""--export: what the exported commands say of dtypes and policies."""

import json


def test_the_checkpoints_own_dtype_is_planned_and_exported(exegpt):
    options = ("-l", "inf", "-w", "200/10", "--no-advice", "--policy", "chunked", "--export", "vllm")
    for model, cluster, dtype in (
        ("llama-3.1-8b", "1xA40", "bfloat16"),
        ("Qwen/Qwen2.5-7B-Instruct", "1xA40", "bfloat16"),
        ("opt-13b", "1xA40", "float16"),
    ):
        done = exegpt("tune", "-m", model, "-c", cluster, *options)
        assert f"--dtype {dtype} " in done.out and "the checkpoint's own" in done.err
    assert "vllm serve Qwen/Qwen2.5-7B-Instruct " in exegpt("tune", "-m", "Qwen/Qwen2.5-7B-Instruct", *options).out


def test_a_device_without_bf16_falls_back_to_fp16_with_a_note(exegpt, tmp_path):
    (tmp_path / "v100.yaml").write_text(
        "nodes: 1\ndevices_per_node: 1\nintra: {bandwidth_bytes_s: 1.0e+11}\ninter: {bandwidth_bytes_s: 1.0e+10}\n"
        "device: {kind: V100, memory_bytes: 3.4e+10, bandwidth_bytes_s: 9.0e+11, flops_s: {fp16: 1.25e+14}}\n"
    )
    where = ("-c", tmp_path / "v100.yaml", "-l", "inf", "-w", "200/10", "--no-advice", "--policy", "chunked")
    done = exegpt("tune", "-m", "llama-3.1-8b", *where, "--json").json
    assert done["schedule"]["dtype"] == "fp16"
    assert any("V100 doesn't compute in bf16" in text for text in done["assumptions"])


def test_a_model_directory_in_fp32_is_served_in_bf16(exegpt, tiny):

    config = json.loads((tiny / "config.json").read_text())
    assert config["dtype"] == "float32"
    done = exegpt("tune", "-m", tiny, "-c", "1xA40", "-l", "inf", "-w", "20/10", "--no-advice", "--json").json
    assert done["schedule"]["dtype"] == "bf16"
    assert any(text == "dtype: bf16, since checkpoints in fp32 are served in 16 bits" for text in done["assumptions"])


def test_a_policy_that_the_engine_lacks_is_noted_with_those_that_it_has(exegpt):
    command = ("tune", "-l", "inf", "-w", "20/10", "-m", "opt-125m", "-c", "2xA40", "--no-advice", "--export", "vllm")
    for policy, exported in (("rra", True), ("orca", False)):
        assert ("--policy orca,chunked searches" in exegpt(*command, "--policy", policy).out) is exported
