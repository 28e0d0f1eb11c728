"""--admission: a cache that is too small for what requests may need is shared as they need it."""

import json

import pytest


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("input,output\n" + "".join(f"{20 + i % 7},{10 + i % 5}\n" for i in range(12)))
    return path


def replayed(exegpt, trace, *more):
    asked = ("simulate", "-m", "opt-1.3b", "-c", "1xA40", "--replay", trace, "--max-num-seqs", 8, "--kv-blocks", 9)
    return exegpt(*asked, *more, "--json")


def test_grow_has_more_sequences_at_once_and_ends_sooner(exegpt, trace):
    reserve, grow = (replayed(exegpt, trace, "--admission", rule).json for rule in ("reserve", "grow"))
    assert grow["throughput_tok_s"] > 1.1 * reserve["throughput_tok_s"]
    assert replayed(exegpt, trace).json["throughput_tok_s"] == reserve["throughput_tok_s"]


def test_a_steady_state_says_what_it_reckons_with(exegpt):
    done = exegpt("simulate", "-m", "opt-1.3b", "-c", "1xA40", "-w", "T", "--admission", "grow")
    assert done.code == 0 and "the steady state reckons with admission by reserve" in done.err
    assert "admission=grow" in done.out


def test_a_run_keeps_its_tokens_in_a_quarter_of_the_cache(exegpt, tiny, tmp_path):
    rows = [{"id": str(i), "prompt_ids": [1 + i, 2, 3], "max_tokens": 30, "ignore_eos": True} for i in range(8)]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = ("run", "-m", tiny, "-r", tmp_path / "r.jsonl", "--no-profile", "--max-num-seqs", 8, "--json")
    outputs = []
    for name, more in {"a": ("--policy", "orca"), "b": ("--admission", "grow", "--kv-blocks", 4)}.items():
        done = exegpt(*asked, "--out", tmp_path / f"{name}.jsonl", *more)
        assert done.code == 0, done.err
        results = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        outputs.append({result["id"]: result["output_ids"] for result in results})
        schedule = done.json["schedule"]
    assert outputs[0] == outputs[1] and len(outputs[0]) == 8
    assert (schedule["admission"], schedule["kv_blocks"]) == ("grow", 4)


def test_an_unknown_rule_is_one_sentence(exegpt):
    done = exegpt("simulate", "-w", "T", "-m", "opt-1.3b", "-c", "4xA40", "--admission", "foo")
    said = "--admission 'foo' is not known: use one of reserve, grow."
    assert done.code == 2 and said in done.err and len(done.err.strip().splitlines()) == 1


def test_schedules_that_reserve_are_searched_while_a_run_adapts(exegpt, tiny, tmp_path):
    (tmp_path / "r.jsonl").write_text('{"id": "0", "prompt_ids": [1, 2], "max_tokens": 2}\n')
    asked = ("run", "-m", tiny, "-r", tmp_path / "r.jsonl", "--no-profile", "--admission", "grow", "--adapt")
    done = exegpt(*asked)
    assert done.code == 2 and "--adapt searches schedules that reserve" in done.err
