"""`simulate` of launch commands, of any policy's point, and at a rate; `tune` with variables that are fixed."""

import json

import pytest

from exegpt.cli import main

H100 = ("--cluster", "8xH100-SXM", "--workload", "2048/256", "--json")
LLAMA = ("--model", "llama-3.1-70b", "--dtype", "fp8")


def printed(capsys, *words):
    assert main([*words]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_command_is_what_its_settings_are(capsys):
    command = "vllm serve meta-llama/Llama-3.1-70B -tp 2 -dp 4 --max-num-seqs 38 --max-num-batched-tokens 339"
    said = printed(capsys, "simulate", "--command", f"{command} --quantization fp8 --port 1", *H100)
    typed = ("--tp-degree", "2", "--replicas", "4", "--max-num-seqs", "38", "--max-num-batched-tokens", "339")
    settings = printed(capsys, "simulate", *LLAMA, *typed, "--engine", "vllm", *H100)
    for name in ("assumptions", "provenance", "profile_import"):  # which has the model as it was typed
        del settings[name]
    assert {name: said[name] for name in settings} == settings
    assert "flags that do not change this prediction: --port" in said["assumptions"]
    assert said["kv_tokens"] == 16 * said["kv_blocks"] > 100_000


def test_a_command_of_sglang_has_its_engines_time_memory_and_defaults(capsys):
    command = "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-70B --tp-size 2 --quantization fp8"
    said = printed(capsys, "simulate", "--command", f"{command} --enable-mixed-chunk", *H100)
    typed = ("--tp-degree", "2", "--replicas", "1", "--engine", "sglang")
    # Of the eight devices, a command takes those that it names.
    settings = printed(capsys, "simulate", *LLAMA, *typed, "--cluster", "2xH100-SXM", *H100[2:])
    for key in ("throughput_tok_s", "tpot_p99_s", "kv_tokens", "engine"):
        assert said[key] == settings[key], key
    assert said["engine"] == "sglang"
    assert "max_num_seqs: 2,048, the default of sglang on H100-SXM" in said["assumptions"]
    assert not [text for text in said["assumptions"] if "mixed-chunk" in text]
    alone = printed(capsys, "simulate", "--command", command, *H100)
    assert alone["throughput_tok_s"] == said["throughput_tok_s"]
    assert [text for text in alone["assumptions"] if text.startswith("sglang: without --enable-mixed-chunk, ")]


def test_devices_that_a_command_does_not_take_are_idle(capsys):
    said = printed(capsys, "simulate", "--command", "vllm serve llama-3.1-8b --max-num-seqs 64", *H100)
    assert said["utilisation"][1:] == [0.0] * 7 and said["utilisation"][0] > 0.9


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "opt-13b"), "leave --model opt-13b out"),
        (("--tp-degree", "2"), "leave --tp-degree 2 out"),
        (("--schedule", "s.json"), "leave one of them out"),
    ],
)
def test_what_a_command_says_is_not_said_again(words, said, capsys):
    assert main(["simulate", "--command", "vllm serve llama-3.1-8b", "--cluster", "1xH100-SXM", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_command_that_takes_more_devices_than_there_are_is_refused(capsys):
    assert main(["simulate", "--command", "vllm serve llama-3.1-8b -tp 4", "--cluster", "2xH100-SXM"]) == 2
    assert "1 replica of 1 stage of 4 devices do not fit on 2xH100-SXM" in capsys.readouterr().err


def test_a_policy_that_the_launched_server_does_not_run_is_refused(capsys):
    command = ["simulate", "--command", "vllm serve llama-3.1-8b", "--cluster", "1xH100-SXM", "--policy", "rra"]
    assert main(command) == 2
    assert "--command contains the setting of --policy too: leave --policy rra out" in capsys.readouterr().err


def test_at_a_rate_requests_wait(capsys):
    words = ("simulate", "--model", "llama-3.1-8b", "--max-num-seqs", "64", "--cluster", "1xH100-SXM", "--workload")
    slow, quick = (printed(capsys, *words, "2048/256", "--rate", rate, "--json") for rate in ("1/s", "7/s"))
    assert slow["requests"] == quick["requests"] == 20_000
    assert slow["throughput_seq_s"] == pytest.approx(1.0, rel=0.03)
    assert quick["ttft"]["mean"] > 1.3 * slow["ttft"]["mean"]


@pytest.mark.parametrize(
    "words",
    [
        ("--policy", "rra", "--encode-batch", "8", "--decode-iterations", "16"),
        ("--policy", "static", "--encode-batch", "8", "--tp-degree", "4"),
        ("--policy", "hybrid", "--encode-batch", "8", "--micro-batches", "2", "--encode-micro-batches", "4"),
        ("--policy", "waa-c", "--encode-batch", "4", "--encode-devices", "2", "--encode-tp-degree", "2"),
    ],
)
def test_a_point_of_any_policy_is_one_that_tune_finds_with_the_same_fixed(words, capsys):
    where = ("--model", "opt-13b", "--cluster", "4xA40", "--workload", "S", "--json")
    point = printed(capsys, "simulate", *words, *where)
    found = printed(capsys, "tune", "--latency-bound", "inf", *words, *where)
    assert point["throughput_seq_s"] == pytest.approx(found["estimate"]["throughput_seq_s"])
    for name, value in zip(words[2::2], words[3::2], strict=True):
        if name != "--encode-devices":
            schedule = found["schedule"] | found["schedule"]["control"]
            assert schedule[name[2:].replace("-", "_")] == int(value)
    if "--encode-devices" in words:
        assert sum(s["tp"] for s in found["schedule"]["stages"] if s["phase"] == "encode") == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--policy", "rra", "--encode-batch", "8"), "policy rra needs --decode-iterations"),
        (("--policy", "chunked", "--encode-batch", "8"), "Policy chunked has no --encode-batch"),
        (
            ("--policy", "rra", "--encode-batch", "8", "--decode-iterations", "8", "--max-num-seqs", "3"),
            "rra has no --max-",
        ),
        (
            ("--policy", "static", "--encode-batch", "8", "--kv-blocks", "9"),
            "--kv-blocks is not an option of policy static",
        ),
        (("--policy", "static", "--encode-batch", "99999"), "No schedule of policy static has these settings"),
    ],
)
def test_a_point_that_is_none_is_refused(words, said, capsys):
    assert main(["simulate", *words, "--model", "opt-13b", "--cluster", "4xA40", "--workload", "S"]) == 2
    assert said in capsys.readouterr().err


def test_policies_without_a_fixed_variable_are_left_out(capsys):
    words = ("tune", "--latency-bound", "inf", "--max-num-seqs", "64", "--no-advice", *LLAMA, *H100)
    found = printed(capsys, *words)
    assert found["schedule"]["control"]["max_num_seqs"] == 64
    reasons = {a["policy"]: a["reason"] for a in found["alternatives"] if a["schedule"] is None}
    assert reasons["rra"] == "it has no max_num_seqs, which is fixed"
    assert main([*words, "--policy", "rra"]) == 2
    assert "Policy rra has no max_num_seqs; orca, chunked have." in capsys.readouterr().err


def test_devices_may_stay_idle(capsys):
    words = ("tune", "--ttft", "1s", "--tpot", "40ms", "--policy", "chunked", "--no-advice", *LLAMA, "--workload")
    found = [printed(capsys, *words, "2048/256", "--json", "--cluster", f"{n}xH100-SXM") for n in (4, 5)]
    assert found[1]["estimate"]["throughput_tok_s"] >= 0.995 * found[0]["estimate"]["throughput_tok_s"]
    used = sum(s["tp"] for s in found[1]["schedule"]["stages"]) * found[1]["schedule"]["replicas"]
    assert [share > 0 for share in found[1]["estimate"]["utilisation"]] == [True] * used + [False] * (5 - used)
