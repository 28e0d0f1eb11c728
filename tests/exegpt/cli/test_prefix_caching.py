"""--prefix-caching: blocks are kept for requests that begin alike, and for preempted ones."""

import json

import pytest


def test_a_trace_shows_what_preempted_requests_find(exegpt, tmp_path):
    (tmp_path / "t.csv").write_text("input,output\n" + "".join(f"{20 + i % 7},{30 + i % 5}\n" for i in range(12)))
    command = ("simulate", "-m", "opt-1.3b", "-c", "1xA40", "--replay", tmp_path / "t.csv", "--max-num-seqs", 8)
    command += ("--kv-blocks", 9, "--admission", "grow")
    plain, caching = exegpt(*command, "--json").json, exegpt(*command, "--prefix-caching", "--json").json
    assert plain["preemptions"] and plain["reused_tokens"] == 0 < caching["reused_tokens"]
    done = exegpt(*command, "--prefix-caching")
    assert f"preempted requests found {caching['reused_tokens']:,} of their own tokens" in " ".join(done.err.split())


def test_a_steady_state_is_printed_as_one_without_caching(exegpt):
    done = exegpt("simulate", "-m", "opt-1.3b", "-c", "1xA40", "-w", "T", "--prefix-caching")
    assert done.code == 0 and "the steady state ignores prefix caching" in done.err
    assert "prefix_caching=on" in done.out


def test_a_run_has_the_same_tokens_and_is_predicted(exegpt, tiny, tmp_path):
    rows = [{"id": str(i), "prompt_ids": [*range(1, 40), i], "max_tokens": 9, "ignore_eos": True} for i in range(8)]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ("run", "-m", tiny, "-r", tmp_path / "r.jsonl", "--no-profile", "--max-num-seqs", 4, "--policy", "orca")
    outputs, reused = [], []
    for name, more in {"a": (), "b": ("--prefix-caching", "--admission", "grow")}.items():
        done = exegpt(*command, "--json", "--out", tmp_path / f"{name}.jsonl", *more)
        assert done.code == 0, done.err
        results = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        outputs.append({result["id"]: result["output_ids"] for result in results})
        assert done.json["schedule"]["prefix_caching"] is (name == "b")
        reused.append(done.json["reused_tokens"])
    assert outputs[0] == outputs[1] and len(outputs[0]) == 8
    assert reused == [{"measured": 0, "predicted": 0}, {"measured": 7 * 32, "predicted": 7 * 32}]
    notes = exegpt(*command, "--prefix-caching").err
    assert "224 tokens reused from the cache, 224 predicted" in notes


@pytest.mark.parametrize(
    ("command", "more", "message"),
    [
        ("simulate", ("-m", "t5-11b", "--policy", "orca"), "'t5-11b' has an encoder"),
        (
            "simulate",
            ("-m", "opt-1.3b", "--policy", "static"),
            "--prefix-caching requires one of the policies orca, chunked, but the policy is static: leave it out.",
        ),
        (
            "run",
            ("--policy", "rra"),
            "--prefix-caching requires one of the policies orca, chunked, but the policy is rra: leave it out.",
        ),
    ],
)
def test_invalid_combinations_are_refused_in_one_sentence(exegpt, tiny, tmp_path, command, more, message):
    (tmp_path / "r.jsonl").write_text('{"id": "0", "prompt_ids": [1, 2], "max_tokens": 2}\n')
    options = {
        "simulate": ("-w", "T", "-c", "4xA40"),
        "run": ("-m", tiny, "-r", tmp_path / "r.jsonl", "--no-profile"),
    }[command]
    done = exegpt(command, *options, "--prefix-caching", *more)
    assert done.code == 2 and message in done.err and len(done.err.strip().splitlines()) <= 2


def test_a_schedule_file_decides_prefix_caching(exegpt, tmp_path):
    tuned = exegpt("tune", "-l", "inf", "--policy", "orca", "--no-advice", "--out", tmp_path / "s.json")
    assert tuned.code == 0
    done = exegpt("simulate", "--schedule", tmp_path / "s.json", "--prefix-caching")
    assert done.code == 2 and "determines --prefix-caching: leave --prefix-caching or --schedule out" in done.err
    done = exegpt("simulate", "--schedule", tmp_path / "s.json", "--no-prefix-caching")
    assert done.code == 2 and "determines --prefix-caching: leave --no-prefix-caching or --schedule out" in done.err
