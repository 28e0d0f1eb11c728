"""`--engine`: whose time a roofline has, and the printed errors of such predictions."""

import pytest

from tests.exegpt.cli.conftest import run_command
from tests.exegpt.cli.test_bad_inputs import check_refused
from xcore.specs.device_sheets import KINDS, SHEETS
from xprofiler.roofline_errors import COMPARED

LLAMA = ("--model", "llama-3.1-8b", "--cluster", "2xH100-SXM", "--workload", "512/64")


def simulated(*more):
    done = run_command("simulate", *LLAMA, "--tp-degree", 2, "--max-num-seqs", 64, *more, "--json")
    assert done.code == 0, done.err
    return done.json


def test_engines_differ_and_none_is_the_quickest():
    names = ("vllm", "vllm-0.11", "tensorrt-llm", "paper", "none")
    rates = {name: simulated("--engine", name)["throughput_tok_s"] for name in names}
    assert rates["none"] == rates["paper"] > max(rates["vllm"], rates["vllm-0.11"]) > rates["tensorrt-llm"]
    assert rates["vllm"] != rates["vllm-0.11"]
    assert simulated()["throughput_tok_s"] == rates["vllm"]


@pytest.mark.parametrize("command", ["tune -l inf", "simulate --max-num-seqs 8"])
def test_an_unknown_engine_is_refused_with_the_list(command):
    done = run_command(*command.split(), *LLAMA, "--engine", "triton")
    check_refused(done, r"no engine 'triton': use one of tensorrt-llm, vllm, vllm-0.11, sglang, exegpt, paper, none")


def test_an_engine_beside_a_measured_profile_is_refused(tiny, tiny_profile):
    done = run_command("tune", "-l", "inf", "--model", tiny, "-w", "20/10", "-p", tiny_profile, "--engine", "vllm")
    check_refused(
        done, r"--engine vllm requires a roofline or imported kernels, but the profile '.*' was measured with engine"
    )


def notes(*command):
    done = run_command(*command, "--json")
    assert done.code == 0, done.err
    assumed = done.json["assumptions"]
    return [next((text for text in assumed if text.startswith(name)), None) for name in ("profile:", "accuracy:")]


QUESTION = ("simulate", *LLAMA, "--max-num-seqs", 8)


def test_every_answer_states_its_engines_terms():
    profile, _ = notes(*QUESTION)
    assert profile.endswith(
        "with the time of engine vllm, the default, 2 iterations in flight, 7 ms per request outside the engine, "
        "sampling by top-p or top-k as in the checkpoint's generation_config.json"
    )
    assert notes(*QUESTION, "--engine", "none")[0].endswith("without the time of an engine")
    assert notes(*QUESTION, "--front-end", "13ms")[0].count("13 ms per request outside the engine") == 1


@pytest.mark.parametrize("engine", ["vllm", "tensorrt-llm"])
def test_the_printed_accuracy_is_of_the_same_engine_and_device(engine):
    _, accuracy = notes(*QUESTION, "--engine", engine)
    facts = [fact for fact in COMPARED if (fact.engine, fact.device) == (engine, "H100-SXM")]
    assert facts and accuracy.startswith(
        f"accuracy: {facts[0].quantity} of engine {engine} on H100-SXM had median errors "
    )
    for fact in facts:
        assert f"{fact.median_error:.0%} at TP{fact.tp} ({fact.rows})" in accuracy
    assert f"({sum(fact.rows for fact in COMPARED)})" not in accuracy
    assert facts[0].load in accuracy and "not used for fitting" in accuracy and "exceed a quarter" in accuracy


def test_an_engine_or_a_device_that_was_never_compared_has_a_note(tmp_path):
    _, accuracy = notes(*QUESTION, "--engine", "none")
    assert accuracy.startswith("accuracy: rooflines of engine none were not compared with measurements; only those of ")
    _, accuracy = notes("simulate", "--model", "opt-13b", "--cluster", "4xA40", "--max-num-seqs", 8, "--tp-degree", 4)
    assert accuracy.startswith("accuracy: rooflines of engine vllm were not compared with measurements on A40, ")
    other = tmp_path / "slow.yaml"
    other.write_text("kind: H100-SXM\nnodes: 1\ndevices_per_node: 2\nintra: {bandwidth_bytes_s: 2.0e+10}\n")
    _, accuracy = notes("simulate", *LLAMA[:2], *LLAMA[4:], "--cluster", other, "--max-num-seqs", 8)
    assert accuracy.endswith("this cluster has another device or link")


QUICK = ("T4", "H20", "MI300X", "GB300")
"""Kinds of four generations, in every run of the tests."""


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_every_device_answers_and_says_what_was_not_measured_on_it(kind):
    question = ("-m", "opt-1.3b", "-c", f"2x{kind.lower()}", "-w", "128/32", "--json")
    done = run_command("simulate", *question, "--max-num-seqs", 8, "--tp-degree", 2)
    assert done.code == 0 and done.json["throughput_tok_s"] > 100, done.err
    said = [text for text in done.json["assumptions"] if text.startswith("not compared on")]
    texts = SHEETS[kind].not_compared
    assert said == ([f"not compared on {kind}: {'; '.join(texts)}"] if texts else [])
    tuned = run_command("tune", "-l", "inf", "--policy", "chunked", "--no-advice", *question)
    assert tuned.code == 0 and set(said) <= set(tuned.json["assumptions"]), tuned.err


@pytest.mark.parametrize(("device", "limits"), [("A100-80GB", 3), ("H100-SXM", 2)])
def test_known_limits_are_those_of_the_device(device, limits):
    done = run_command("simulate", *LLAMA[:2], "-c", f"1x{device}", "-w", "512/64", "--max-num-seqs", 8, "--json")
    (text,) = [text for text in done.json["assumptions"] if text.startswith("known limits of engine vllm: ")]
    assert len(text.split("; ")) == limits and ("9 % too short" in text) == (device == "A100-80GB")


def test_the_front_end_adds_to_first_tokens_and_latencies_alone(tiny, tiny_profile):
    """Under an engine, and with a measured profile."""
    measured = ("simulate", "--model", tiny, "--cluster", "local", "-w", "20/10", "-p", tiny_profile)
    for question, usual_s in ((QUESTION, 7e-3), ((*measured, "--max-num-seqs", 4), 0.0)):
        usual, late = (run_command(*question, *more, "--json").json for more in ((), ("--front-end", "13ms")))
        for name in ("ttft_s", "ttft_p99_s", "latency_s", "latency_p50_s"):
            assert late[name] - usual[name] == pytest.approx(13e-3 - usual_s)
        assert (late["tpot_s"], late["throughput_tok_s"]) == (usual["tpot_s"], usual["throughput_tok_s"])


@pytest.mark.parametrize("text", ["2m", "fast", "-1ms", "inf"])
def test_a_front_end_time_that_is_none_is_refused(text):
    check_refused(run_command(*QUESTION, f"--front-end={text}"), "--front-end .* is not a delay")


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
    assert "the roofline that the schedule is based on" in again["assumptions"][0]
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
