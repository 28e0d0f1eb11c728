"""--export: what the exported commands say of dtypes and policies."""

import json

import pytest


def test_the_checkpoints_own_dtype_is_planned_and_exported(exegpt):
    options = ("-l", "inf", "-w", "200/10", "--no-advice", "--policy", "chunked", "--export", "vllm")
    for model, cluster, dtype in (
        ("llama-3.1-8b", "1xA40", "bfloat16"),
        ("Qwen/Qwen2.5-7B-Instruct", "1xA40", "bfloat16"),
        ("opt-13b", "1xA40", "float16"),
    ):
        done = exegpt("tune", "-m", model, "-c", cluster, *options)
        assert f"--dtype {dtype} " in done.out and "the checkpoint's dtype" in done.err
    assert "vllm serve Qwen/Qwen2.5-7B-Instruct " in exegpt("tune", "-m", "Qwen/Qwen2.5-7B-Instruct", *options).out


def test_a_device_without_bf16_falls_back_to_fp16_with_a_note(exegpt, tmp_path):
    (tmp_path / "v100.yaml").write_text(
        "nodes: 1\ndevices_per_node: 1\nintra: {bandwidth_bytes_s: 1.0e+11}\ninter: {bandwidth_bytes_s: 1.0e+10}\n"
        "device: {kind: V100, memory_bytes: 3.4e+10, bandwidth_bytes_s: 9.0e+11, flops_s: {fp16: 1.25e+14}}\n"
    )
    where = ("-c", tmp_path / "v100.yaml", "-l", "inf", "-w", "200/10", "--no-advice", "--policy", "chunked")
    done = exegpt("tune", "-m", "llama-3.1-8b", *where, "--json").json
    assert done["schedule"]["dtype"] == "fp16"
    assert any("V100 does not compute in bf16" in text for text in done["assumptions"])


def test_a_model_directory_in_fp32_is_served_in_bf16(exegpt, tiny):

    config = json.loads((tiny / "config.json").read_text())
    assert config["dtype"] == "float32"
    where = ("-m", tiny, "-c", "1xA40", "-l", "inf", "-w", "20/10", "--policy", "rra", "--decode-iterations", 4)
    done = exegpt("tune", *where, "--no-advice", "--json").json
    assert done["schedule"]["dtype"] == "bf16"
    assert any(text == "dtype: bf16, because checkpoints in fp32 are served in 16 bits" for text in done["assumptions"])


ASKED = ("tune", "-w", "2048/256", "-m", "llama-3.1-70b", "-c", "4xH100-SXM", "--dtype", "fp8")
ASKED += ("--no-advice", "--policy", "chunked,waa-c")
TIGHT = ("--ttft", "1s", "--tpot", "40ms")
"""WAA has the best schedule."""


def test_a_policy_that_the_engine_lacks_is_refused_with_those_that_it_has(exegpt):
    done = exegpt(*ASKED[:-1], "rra", "-l", "inf", "--export", "vllm")
    assert done.code == 2 and "vllm runs (chunked), but --policy has only rra" in done.err


def test_the_answer_ends_with_the_best_of_all_and_the_best_on_the_engine(exegpt):
    printed = exegpt(*ASKED, *TIGHT).out
    *_, of_all, on_engine = printed.splitlines()
    assert of_all.startswith("Best of all: ") and " waa-c (exegpt) " in printed and " chunked (vllm) " in printed
    assert " with waa-c encode_batch=" in of_all and of_all.endswith(", runs on exegpt.")
    assert on_engine.startswith("Best on vllm: ") and on_engine.endswith(" on 2 replicas of TP2.")


def test_json_has_the_best_on_the_engine_and_what_the_export_gives(exegpt):
    answer = exegpt(*ASKED, *TIGHT, "--export", "vllm", "--json").json
    assert answer["schedule"]["policy"] == "waa-c" and answer["estimate"]["engine"] == "exegpt"
    best = answer["best_on_engine"]
    assert best["engine"] == best["estimate"]["engine"] == "vllm" and best["schedule"]["policy"] == "chunked"
    assert answer["export"].startswith("vllm serve ") and answer["export_estimate"]["tpot_bounded_s"] <= 0.04
    assert "export_loses" not in answer
    shares = {answer["schedule"]["cluster"]["memory_fraction"], best["schedule"]["cluster"]["memory_fraction"]}
    assert shares == {0.9, 0.92}, "each in its own engine's share of the memory"
    (other,) = (a for a in answer["alternatives"] if a["policy"] == "chunked")
    assert {"cluster", "profile"} < set(other["schedule"]) and "model" not in other["schedule"]


@pytest.mark.slow
def test_the_file_is_the_best_of_all_or_of_the_engine_that_was_asked_for(exegpt, tmp_path):
    for engine, policy in (((), "waa-c"), (("--engine", "vllm"), "chunked"), (("--engine", "exegpt"), "waa-c")):
        exegpt(*ASKED, *TIGHT, *engine, "-o", tmp_path / "s.json")
        assert json.loads((tmp_path / "s.json").read_text())["policy"] == policy


def test_each_policy_is_simulated_as_it_was_predicted(exegpt, tmp_path):
    """A schedule's file, or the same point by hand, under the engine that runs its policy."""
    answer = exegpt(*ASKED, *TIGHT, "-o", tmp_path / "s.json", "--json").json
    found = exegpt("simulate", "-s", tmp_path / "s.json", "--json").json
    assert found["engine"] == "exegpt" and found["throughput_seq_s"] == answer["estimate"]["throughput_seq_s"]
    point = ("simulate", *ASKED[1:9], "--engine", "vllm", "--policy", "rra", "--encode-batch", 4)
    assert exegpt(*point, "--decode-iterations", 8, "--json").json["engine"] == "exegpt"


@pytest.mark.slow
def test_advice_compares_schedules_of_one_engine(exegpt):
    where = (*ASKED[:9], "--policy", "chunked,waa-c", "--engine", "vllm", "--advice")
    (bigger,) = (line for line in exegpt(*where, *TIGHT).out.splitlines() if "twice" in line)
    assert bigger.endswith(" with chunked")


@pytest.mark.slow
def test_presets_of_no_engine_predict_all_policies_with_one(exegpt):
    for engine in ("paper", "none"):
        answer = exegpt(*ASKED, "-l", "inf", "--engine", engine, "--json").json
        assert {a["estimate"]["engine"] for a in answer["alternatives"]} == {engine}
        assert answer["best_on_engine"]["schedule"] == answer["schedule"]


def test_an_export_at_a_rate_is_replayed_at_the_rate(exegpt):
    where = ("-w", "2048/256", "-m", "llama-3.1-8b", "-c", "1xH100-SXM", "--policy", "chunked")
    command = ("tune", *where, "--ttft", "1s", "--rate", "5/s", "--export", "vllm", "--json")
    answer = exegpt(*command).json
    there = answer["export_estimate"]
    assert there["latency_from"] == "arrival" and there["ttft_bounded_s"] <= 1.0
    assert abs(there["throughput_seq_s"] / 5.0 - 1.0) < 0.01
    assert any("assumes that no prompts share a prefix" in text for text in answer["assumptions"])


def test_an_exports_engine_makes_the_predictions_and_its_file_is_written(exegpt, tmp_path):
    where = ("tune", "-w", "200/10", "-m", "llama-3.1-8b", "-c", "1xH100", "-l", "inf", "--policy", "chunked")
    file = tmp_path / "start.yaml"
    printed = exegpt(*where, "--no-advice", "--export", "sglang", "--export-as", "kubernetes", "--export-out", file).out
    assert "Kubernetes file for sglang; its predicted performance is req/s" in printed
    assert printed.endswith("Best on sglang: the same schedule.\n") and file.read_text().strip() in printed
