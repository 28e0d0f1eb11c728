"""`simulate`'s options that decide the KV capacity, and the figures that it prints of it."""

import pytest

from tests.exegpt.cli.test_bad_inputs import check_refused

COMMAND = ("simulate", "-m", "llama-3.1-70b", "--dtype", "fp8", "-c", "2xH100-SXM", "-w", "2048/256")


def capacity(exegpt, *more):
    facts = exegpt(*COMMAND, "--json", *more).json
    assert facts["kv_tokens"] == 16 * facts["kv_blocks"]
    return facts["kv_tokens"]


def test_share_and_dtype_decide_the_capacity(exegpt):
    usual = capacity(exegpt)
    assert capacity(exegpt, "--gpu-memory-fraction", 0.92) == usual == capacity(exegpt, "--kv-dtype", "bf16")
    more = 2 * (0.95 - 0.92) * 79.19 * 2**30 / (80 * 2 * 8 * 128 * 2)
    assert capacity(exegpt, "--gpu-memory-fraction", 0.95) - usual == pytest.approx(more, abs=16)
    assert capacity(exegpt, "--kv-dtype", "fp8") == pytest.approx(2 * usual, abs=16)
    assert capacity(exegpt, "--kv-blocks", 1000) == 16_000


def test_the_capacity_is_printed(exegpt, tmp_path):
    assert "16,000 tokens, 1,000 blocks of 16" in exegpt(*COMMAND, "--kv-blocks", 1000).out
    (tmp_path / "t.csv").write_text("input,output\n20,30\n20,30\n")
    done = exegpt(*COMMAND, "--kv-blocks", 1000, "--replay", tmp_path / "t.csv")
    assert "KV cache: 16,000 tokens, 1,000 blocks of 16." in done.out


def test_what_does_not_start_is_refused_with_what_lacks(exegpt):
    """70B in 8 bits on one GPU: weights of 67.7 GiB, and sampling from 1,024 sequences."""
    command = ("simulate", "-m", "llama-3.1-70b", "--dtype", "fp8", "-c", "1xH100-SXM", "-w", "512/64")
    done = exegpt(*command, "--engine", "vllm", "--gpu-memory-fraction", 0.9)
    check_refused(done, "can't start on 1xH100-SXM.*67.67 GiB.*8,192 tokens and 1,024 sequences")
    smaller = ("--max-num-seqs", 64, "--max-num-batched-tokens", 2048)
    assert exegpt(*command, "--engine", "vllm", "--gpu-memory-fraction", 0.9, *smaller).code == 0


@pytest.mark.parametrize("option", [("--kv-dtype", "fp8"), ("--gpu-memory-fraction", 0.8)])
def test_a_schedule_file_says_it_itself(exegpt, tmp_path, option):
    file = tmp_path / "s.json"
    exegpt("tune", "-l", "inf", "-m", "opt-1.3b", "-c", "1xA40", "-w", "64/8", "--policy", "static", "--out", file)
    check_refused(exegpt("simulate", "--schedule", file, *option), f"The schedule file determines {option[0]}")


def test_the_table_at_a_rate_has_tpot_where_it_is_bounded(exegpt):
    command = ("tune", "-l", "20s", "--rate", "0.5/s", "-w", "64/8", "-m", "opt-1.3b", "-c", "1xA40", "--no-advice")
    plain, bounded = exegpt(*command, "--policy", "static"), exegpt(*command, "--policy", "static", "--tpot", "1s")
    assert "TPOT p99" not in plain.out and "TPOT p99" in bounded.out
