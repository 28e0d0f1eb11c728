"""--admission: a cache that is too small for what requests may need is shared as they need it."""

import json

import pytest


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("input,output\n" + "".join(f"{20 + i % 7},{10 + i % 5}\n" for i in range(12)))
    return path


def replayed(exegpt, trace, *more):
    command = ("simulate", "-m", "opt-1.3b", "-c", "1xA40", "--replay", trace, "--max-num-seqs", 8, "--kv-blocks", 9)
    return exegpt(*command, *more, "--json")


def test_grow_has_more_sequences_at_once_and_ends_sooner(exegpt, trace):
    reserve, grow = (replayed(exegpt, trace, "--admission", rule).json for rule in ("reserve", "grow"))
    assert grow["throughput_tok_s"] > 1.1 * reserve["throughput_tok_s"]
    assert replayed(exegpt, trace).json["throughput_tok_s"] == reserve["throughput_tok_s"]


def test_a_steady_state_has_both_rules(exegpt):
    command = ("simulate", "-m", "opt-1.3b", "-c", "1xA40", "-w", "T", "--kv-blocks", 1000, "--max-num-seqs", 256)
    reserve, grow = (exegpt(*command, "--admission", rule, "--json") for rule in ("reserve", "grow"))
    assert grow.json["throughput_tok_s"] > 1.1 * reserve.json["throughput_tok_s"]
    assert (reserve.json["preemptions_per_request"], grow.json["preemptions_per_request"] > 0.1) == (0.0, True)
    done = exegpt(*command, "--admission", "grow")
    assert done.code == 0 and "admission=grow" in done.out and "per request" in done.out


def test_tune_searches_the_chosen_rule(exegpt, tmp_path):
    command = ("tune", "-l", "inf", "-m", "opt-13b", "-c", "1xA40", "-w", "T", "--policy", "chunked,rra", "--no-advice")
    answers = {rule: exegpt(*command, "--admission", rule, "--json") for rule in ("reserve", "grow", "auto")}
    assert exegpt(*command, "--json").json["schedule"] == answers["reserve"].json["schedule"]
    rules = {rule: done.json["schedule"]["admission"] for rule, done in answers.items()}
    assert rules == {"reserve": "reserve", "grow": "grow", "auto": "grow"}
    reserve, grow, auto = (done.json["estimate"]["throughput_tok_s"] for done in answers.values())
    assert auto == grow > 1.1 * reserve
    alternatives = {a["policy"]: a["schedule"] for a in answers["grow"].json["alternatives"]}
    assert alternatives["rra"] is None and alternatives["chunked"]["admission"] == "grow"
    done = exegpt(*command, "--admission", "auto", "--out", tmp_path / "s.json")
    assert "preempted" in done.err and "admission grow is not searched for rra" in done.err
    assert "admission=grow" in exegpt("simulate", "--schedule", tmp_path / "s.json").out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--admission", "often"), "--admission 'often' is not known: use one of reserve, grow, auto."),
        (
            ("--policy", "rra,static", "--admission", "grow"),
            "Admission 'grow' has no steady-state formula for rra",
        ),
    ],
)
def test_what_tune_cannot_search_is_refused_in_one_sentence(exegpt, more, message):
    done = exegpt("tune", "-l", "inf", "-c", "4xA40", "-w", "S", *more)
    assert done.code == 2 and message in done.err.strip().splitlines()[-1]


def test_a_run_keeps_its_tokens_in_a_quarter_of_the_cache(exegpt, tiny, tmp_path):
    rows = [{"id": str(i), "prompt_ids": [1 + i, 2, 3], "max_tokens": 30, "ignore_eos": True} for i in range(8)]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ("run", "-m", tiny, "-r", tmp_path / "r.jsonl", "--no-profile", "--max-num-seqs", 8, "--json")
    outputs = []
    for name, more in {"a": ("--policy", "orca"), "b": ("--admission", "grow", "--kv-blocks", 4)}.items():
        done = exegpt(*command, "--out", tmp_path / f"{name}.jsonl", *more)
        assert done.code == 0, done.err
        results = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        outputs.append({result["id"]: result["output_ids"] for result in results})
        schedule = done.json["schedule"]
    assert outputs[0] == outputs[1] and len(outputs[0]) == 8
    assert (schedule["admission"], schedule["kv_blocks"]) == ("grow", 4)


def test_an_unknown_rule_is_one_sentence(exegpt):
    done = exegpt("simulate", "-w", "T", "-m", "opt-1.3b", "-c", "4xA40", "--admission", "foo")
    message = "--admission 'foo' is not known: use one of reserve, grow."
    assert done.code == 2 and message in done.err and len(done.err.strip().splitlines()) == 1


@pytest.mark.parametrize("option", [("--admission", "grow"), ("--prefix-caching",)])
def test_a_run_that_adapts_has_the_cache_that_was_asked_for(exegpt, tiny, tmp_path, option):
    (tmp_path / "r.jsonl").write_text('{"id": "0", "prompt_ids": [1, 2], "max_tokens": 2}\n')
    done = exegpt("run", "-m", tiny, "-r", tmp_path / "r.jsonl", "--no-profile", "--adapt", *option, "--json")
    assert done.code == 0, done.err
    schedule = done.json["schedule"]
    assert schedule["prefix_caching"] == ("--prefix-caching" in option)
    assert schedule["admission"] == ("grow" if "grow" in option else "reserve")


def test_without_a_formula_a_run_has_no_steady_state_beside_it_and_a_replay_estimates(exegpt, tiny, tmp_path):
    rows = [{"id": str(i), "prompt_ids": [1 + i, 2, 3], "max_tokens": 9, "ignore_eos": True} for i in range(4)]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ("run", "-m", tiny, "-r", tmp_path / "r.jsonl", "--no-profile", "--policy", "rra", "--admission", "grow")
    done = exegpt(*command, "--json")
    assert done.code == 0, done.err
    assert done.json["predicted_steady"] is None and done.json["predicted"]["throughput_tok_s"] > 0
    (tmp_path / "s.json").write_text(json.dumps(done.json["schedule"]))
    again = exegpt(*command[:5], "--no-profile", "--schedule", tmp_path / "s.json")
    assert again.code == 0 and "steady" not in again.out, again.err
    done = exegpt("simulate", "--schedule", tmp_path / "s.json", "--profile", "roofline", "--json")
    assert done.code == 0 and done.json["throughput_tok_s"] > 0 and done.json["preemptions_per_request"] >= 0
