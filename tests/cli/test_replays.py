"""What `exegpt simulate` says about a trace that it replays, and about an engine's settings that it was not told."""

import pytest

ENGINE = ("simulate", "-m", "opt-13b", "-c", "1xA40")


def test_a_replay_keeps_the_pairs_of_lengths_and_does_not_say_otherwise(exegpt, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("input,output,arrival\n" + "".join(f"{10 + i},{10 + i},{i}\n" for i in range(20)))
    asked = (*ENGINE, "--max-num-seqs", 4, "--json")
    told = exegpt(*asked, "--replay", path).json["assumptions"]
    assert not any("independent" in text or "arrivals" in text for text in told)
    assert any("independent" in text for text in exegpt(*asked, "-w", path).json["assumptions"])


@pytest.mark.parametrize("header", ["input,output", "input,output,arrival"])
def test_a_replay_without_arrivals_says_that_all_requests_are_there_at_the_start(exegpt, tmp_path, header):
    path = tmp_path / "t.csv"
    path.write_text(f"{header}\n" + ("10,5,3\n" if "arrival" in header else "10,5\n") * 9)
    done = exegpt(*ENGINE, "--max-num-seqs", 4, "--replay", path)
    assert "all requests of t.csv are there at the start" in done.err
    path.write_text("input,output\n10,5\n")
    done = exegpt(*ENGINE, "--max-num-seqs", 4, "--replay", path)
    assert "at the start" not in done.err and "1 request of t.csv in" in done.out


def test_settings_that_follow_from_others_are_not_called_defaults(exegpt):
    told = exegpt(*ENGINE, "--max-num-batched-tokens", 8, "--json").json["assumptions"]
    assert "max_num_seqs: 8, one per token of the budget" in told
    told = exegpt(*ENGINE, "--json").json["assumptions"]
    assert "max_num_seqs: 256, vLLM's default on A40" in told


def test_blocks_too_large_for_memory_are_not_answered_with_more_blocks(exegpt):
    done = exegpt(*ENGINE, "--max-num-seqs", 4, "--block-size", 1_000_000)
    assert done.code == 2 and "0 KV blocks of 1,000,000 tokens" in done.err
    assert "lower --block-size" in done.err and "--kv-blocks" not in done.err
