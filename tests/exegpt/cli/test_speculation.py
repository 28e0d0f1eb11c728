"""Speculative decoding in `tune`, `simulate` and `show`: what is printed, in JSON too, and what a schedule keeps."""

import pytest

from tests.exegpt.cli.test_bad_inputs import check_refused

WHERE = ("-m", "llama-3.1-8b", "-c", "1xH100-SXM", "-w", "512/256")
TUNE = ("tune", "-l", "inf", *WHERE, "--policy", "orca", "--prefills-per-step", 1, "--no-advice")


def test_a_schedule_keeps_its_drafts_and_is_predicted_and_replayed_alike(exegpt, tmp_path):
    file = tmp_path / "schedule.json"
    drafts = ("--draft-acceptance", "0.8,0.6", "--draft-model", "llama-3.2-1b", "--num-speculative-tokens", 2)
    answer = exegpt(*TUNE, *drafts, "--json", "-o", file).json
    speculation, estimate = answer["speculation"], answer["estimate"]
    assert speculation["draft_tokens"] == 2 and speculation["tokens_per_step"] == pytest.approx(2.4)
    assert {"batch", "drafted", "speedup"} == speculation["by_batch"][0].keys()
    again = exegpt("simulate", "--schedule", file, "--json").json
    assert again["throughput_tok_s"] == pytest.approx(estimate["throughput_tok_s"], rel=1e-9)
    assert again["speculation"]["tokens_per_step"] == pytest.approx(2.4)
    with_more = exegpt("simulate", "--schedule", file, "--num-speculative-tokens", 3)
    check_refused(with_more, "The schedule file determines --num-speculative-tokens")
    shown = exegpt("show", file)
    assert shown.code == 0 and "draft_tokens=2" in shown.out
    replayed = exegpt("simulate", "--schedule", file, "--rate", "4/s")
    assert replayed.code == 0 and "2.4 tokens per iteration and sequence on average" in replayed.out


def test_the_exported_command_is_simulated_as_predicted(exegpt):
    drafts = ("--draft-acceptance", 0.7)
    asked = (*WHERE, "--policy", "chunked", "--max-num-seqs", 32, "--max-num-batched-tokens", 1024, "--no-advice")
    answer = exegpt(
        "tune", "-l", "inf", *asked, *drafts, "--num-speculative-tokens", 3, "--export", "vllm", "--json"
    ).json
    assert '"num_speculative_tokens": 3' in answer["export"]
    where = ("-c", "1xH100-SXM", "-w", "512/256", "--json")
    read = exegpt("simulate", "--command", answer["export"], *where, *drafts).json
    assert read["throughput_tok_s"] == pytest.approx(answer["export_estimate"]["throughput_tok_s"], rel=0.02)
    check_refused(exegpt("simulate", "--command", answer["export"], *where), "needs the acceptance of draft tokens")


def test_what_cannot_be_asked_is_refused(exegpt, tmp_path):
    check_refused(exegpt(*TUNE, "--num-speculative-tokens", 3), "needs the acceptance of draft tokens")
    typed = ("simulate", "-m", "llama-3.1-8b", "-c", "1xH100-SXM", "-w", "512/256", "--policy", "static")
    check_refused(exegpt(*typed, "--encode-batch", 8, "--draft-acceptance", 0.7), "searched only by tune")
    check_refused(exegpt(*TUNE, "--draft-acceptance", "missing.yaml"), "no acceptance file")
    far = tmp_path / "far.yaml"
    far.write_text("m: {12: 4.0, 16: 4.5}")
    check_refused(exegpt(*TUNE, "--draft-acceptance", far), "pass --num-speculative-tokens, like 12")
    assert exegpt(*TUNE, "--draft-acceptance", far, "--num-speculative-tokens", 0, "--json").code == 0
