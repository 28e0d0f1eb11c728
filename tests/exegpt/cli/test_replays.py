"""What `exegpt simulate` prints about a replayed trace, and about engine settings that were left out."""

import json
from dataclasses import replace

import pytest

from tests.xcore.small_specs import profile
from xcore import document
from xcore.specs.builtin_models import builtin_model

ENGINE = ("simulate", "-m", "opt-13b", "-c", "1xA40")


def test_a_replay_keeps_the_pairs_of_lengths_without_a_note_on_independence(exegpt, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("input,output,arrival\n" + "".join(f"{10 + i},{10 + i},{i}\n" for i in range(20)))
    command = (*ENGINE, "--max-num-seqs", 4, "--json")
    assumptions = exegpt(*command, "--replay", path).json["assumptions"]
    assert not any("independent" in text or "at the start" in text for text in assumptions)
    assert any("independent" in text for text in exegpt(*command, "-w", path).json["assumptions"])


@pytest.mark.parametrize("header", ["input,output", "input,output,arrival"])
def test_a_replay_without_arrivals_notes_that_all_requests_arrive_at_the_start(exegpt, tmp_path, header):
    path = tmp_path / "t.csv"
    path.write_text(f"{header}\n" + ("10,5,3\n" if "arrival" in header else "10,5\n") * 9)
    done = exegpt(*ENGINE, "--max-num-seqs", 4, "--replay", path)
    assert "all requests of t.csv arrive at the start" in done.err
    path.write_text("input,output\n10,5\n")
    done = exegpt(*ENGINE, "--max-num-seqs", 4, "--replay", path)
    assert "at the start" not in done.err and "1 request of t.csv in" in done.out


def test_settings_that_follow_from_others_are_not_called_defaults(exegpt):
    assumptions = exegpt(*ENGINE, "--max-num-batched-tokens", 8, "--json").json["assumptions"]
    assert "max_num_seqs: 8, one for each token of the budget" in assumptions
    assumptions = exegpt(*ENGINE, "--json").json["assumptions"]
    assert "max_num_seqs: 256, the default of vllm on A40" in assumptions


def test_blocks_too_large_for_memory_are_not_answered_with_more_blocks(exegpt):
    done = exegpt(*ENGINE, "--max-num-seqs", 4, "--block-size", 1_000_000)
    assert done.code == 2 and "0 KV blocks of 1,000,000 tokens" in done.err
    assert "lower --block-size" in done.err and "--kv-blocks" not in done.err


@pytest.mark.parametrize(("device", "note"), [("L40S", ", measured on L40S, not on H100-SXM"), ("NVIDIA H100", "")])
def test_a_profile_of_another_device_is_noted(exegpt, tmp_path, device, note):
    path = tmp_path / "p.json"
    document.write(path, replace(profile(builtin_model("opt-13b")), device=device))
    done = exegpt("simulate", "-m", "opt-13b", "-c", "1xH100", "--max-num-seqs", 4, "-p", path, "--json")
    assert f"profile: '{path}'{note}" in done.json["assumptions"]


def test_a_schedule_simulated_on_another_profile_has_a_note(exegpt, tmp_path):
    path, options = tmp_path / "s.json", ("-l", "inf", "-c", "1xH100", "--policy", "orca", "--no-advice")
    document.write(tmp_path / "p.json", profile(builtin_model("opt-13b")))
    assert exegpt("tune", *options, "-p", tmp_path / "p.json", "-o", path).code == 0
    another = "the schedule was found with another profile"
    assert another in exegpt("simulate", "-s", path).err
    assert another not in exegpt("simulate", "-s", path, "-p", tmp_path / "p.json").err


def test_a_device_of_one_rate_is_planned_at_it(exegpt, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "nodes: 1\ndevices_per_node: 1\ndevice: {memory_bytes: 1.0e11, bandwidth_bytes_s: 1.0e12, "
        "flops_s: {bf16: 3.0e14}}\nintra: {bandwidth_bytes_s: 1.0e11}\n"
    )
    done = exegpt("simulate", "-m", "opt-13b", "-c", path, "--max-num-seqs", 4)
    assert done.code == 0 and "dtype: bf16, because c does not compute in fp16" in done.err
    done = exegpt("simulate", "-m", "opt-13b", "-c", path, "--max-num-seqs", 4, "--dtype", "fp16")
    assert done.code == 2 and "bf16 as --dtype" in done.err


def test_the_mean_of_lengths_keeps_four_digits(exegpt, tmp_path):
    path = tmp_path / "s.json"
    options = ("-m", "llama-3.1-8b", "-c", "1xH100", "-w", "2048/256", "--policy", "orca", "--no-advice")
    assert exegpt("tune", "-l", "inf", *options, "-o", path).code == 0
    assert "input 2,048±0" in exegpt("show", path).out


def test_a_steady_state_says_that_it_leaves_arrivals_out(exegpt, tmp_path):
    path, texts = tmp_path / "s.json", []
    for rate in ((), ("--rate", "1/s")):
        orca = ("--policy", "orca", "--max-num-seqs", "16")
        tuned = exegpt("tune", "-l", "20s", "-c", "1xA40", *orca, "--no-advice", "--out", path, *rate)
        assert tuned.code == 0
        texts.append([t for t in exegpt("simulate", "-s", path, "--json").json["assumptions"] if "arrivals" in t])
        texts.append([line for line in exegpt("show", path).err.splitlines() if "arrivals" in line])
    assert [len(found) for found in texts] == [0, 0, 1, 1]
    assert "ignores the arrivals (1/s)" in texts[2][0]


def test_the_schedule_of_the_last_bound_that_can_be_met_is_written_by_name(exegpt, tmp_path):
    path = tmp_path / "s.json"
    orca = ("--policy", "orca", "--max-num-seqs", "16")
    done = exegpt("tune", "-l", "30s,20s,1ms", "-c", "1xA40", *orca, "--out", path)
    assert f"Schedule under 20s written to {path}." in done.out
    assert json.loads(path.read_text())["latency_bound_s"] == 20
