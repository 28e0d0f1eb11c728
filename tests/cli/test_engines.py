"""`--engine`: whose time a roofline has, and the printed errors of such predictions."""

import pytest

from exegpt.compared import COMPARED
from tests.cli.conftest import run_command
from tests.cli.test_bad_inputs import check_refused

LLAMA = ("--model", "llama-3.1-8b", "--cluster", "2xH100-SXM", "--workload", "512/64")


def simulated(*more):
    done = run_command("simulate", *LLAMA, "--tp-degree", 2, "--max-num-seqs", 64, *more, "--json")
    assert done.code == 0, done.err
    return done.json


def test_engines_differ_and_none_is_the_quickest():
    rates = {
        name: simulated("--engine", name)["throughput_tok_s"] for name in ("vllm", "tensorrt-llm", "paper", "none")
    }
    assert rates["none"] == rates["paper"] > max(rates["vllm"], rates["tensorrt-llm"])
    assert simulated()["throughput_tok_s"] == rates["vllm"]


@pytest.mark.parametrize("command", ["tune -l inf", "simulate --max-num-seqs 8"])
def test_an_unknown_engine_is_refused_with_the_list(command):
    done = run_command(*command.split(), *LLAMA, "--engine", "sglang")
    check_refused(done, r"no engine 'sglang': use one of tensorrt-llm, vllm, paper, none")


def test_an_engine_beside_a_measured_profile_is_refused(tiny, tiny_profile):
    done = run_command("tune", "-l", "inf", "--model", tiny, "-w", "20/10", "-p", tiny_profile, "--engine", "vllm")
    check_refused(done, r"--engine vllm is for rooflines, and the times of the profile '.*' are its own engine's")


def notes(*command):
    done = run_command(*command, "--json")
    assert done.code == 0, done.err
    assumed = done.json["assumptions"]
    return [next((text for text in assumed if text.startswith(name)), None) for name in ("profile:", "accuracy:")]


def test_line_9_every_answer_names_its_engine_and_the_error_of_such_predictions():
    profile, accuracy = notes("tune", "-l", "inf", *LLAMA, "--policy", "orca", "--no-advice")
    assert profile.endswith("with the time of engine vllm, the default")
    for one_fact in (fact for fact in COMPARED if fact.device == "H100-SXM"):
        assert f"{one_fact.median_error:.0%} at TP{one_fact.tp} ({one_fact.rows})" in accuracy
    assert "TensorRT-LLM" in accuracy and "more than a quarter" in accuracy
    named, _ = notes("tune", "-l", "inf", *LLAMA, "--policy", "orca", "--no-advice", "--engine", "none")
    assert named.endswith("no engine's own time is in it")


def test_a_device_that_was_never_compared_has_a_note():
    _, accuracy = notes("simulate", "--model", "opt-13b", "--cluster", "4xA40", "--max-num-seqs", 8, "--tp-degree", 4)
    assert accuracy.startswith("accuracy: no published throughput of A40 was compared with rooflines, only of ")


def test_a_measured_profile_has_no_such_sentence(tiny, tiny_profile):
    _, accuracy = notes("tune", "-l", "inf", "--model", tiny, "-w", "20/10", "-p", tiny_profile, "--policy", "rra")
    assert accuracy is None


@pytest.mark.parametrize(("engine", "another"), [("vllm", "none"), ("none", "vllm")])
def test_a_schedule_is_simulated_and_shown_on_the_roofline_that_it_was_found_on(engine, another, tmp_path):
    path = tmp_path / "schedule.json"
    options = ("--policy", "orca", "--no-advice", "--out", path, "--engine", engine, "--kv-dtype", "fp8", "--json")
    answer = run_command("tune", "-l", "inf", *LLAMA, *options).json
    again = run_command("simulate", "--schedule", path, "--json").json
    assert again["throughput_tok_s"] == pytest.approx(answer["estimate"]["throughput_tok_s"])
    assert "the roofline that it was found on" in again["assumptions"][0]
    other = run_command("simulate", "--schedule", path, "--engine", another, "--json").json
    assert other["throughput_tok_s"] != again["throughput_tok_s"]
    shown = run_command("show", path)
    assert shown.code == 0 and "no prediction" not in shown.out + shown.err


def test_keys_and_values_in_8_bits_are_read_in_half_the_time():
    """The roofline's attention depends on the dtype of keys and values, as memory does."""
    rates = {
        kv: run_command(
            *("tune", "-l", "inf", "--model", "llama-3.1-8b", "--cluster", "1xH100-SXM", "-w", "4000/100"),
            *("--kv-dtype", kv, "--policy", "orca", "--no-advice", "--json"),
        ).json["estimate"]
        for kv in ("fp16", "fp8")
    }
    assert rates["fp8"]["tpot_s"] is not None and rates["fp8"]["throughput_tok_s"] > rates["fp16"]["throughput_tok_s"]
