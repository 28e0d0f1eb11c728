"""`--prefix-hit`: a share of the prompts' tokens is in the cache, for `tune` and `simulate`."""

import json
from dataclasses import replace

import pytest

from xcore.files import read_schedule
from xcore.specs.request_times import steady_tokens_s
from xprofiler import rooflines
from xsimulator.replay.event_simulator import replay

MODEL = ("-m", "opt-1.3b", "-c", "1xA40")
TUNE = ("tune", *MODEL, "-w", "900/60", "-l", "12s", "--no-advice", "--json")


def test_a_search_is_as_good_as_an_exhaustive_one_and_its_answer_as_its_replay(exegpt, tmp_path):
    out = tmp_path / "schedule.json"
    done = exegpt(*TUNE, "--prefix-hit", 0.7, "--policy", "orca,chunked", "--max-num-seqs", 48, "--out", out)
    assert done.code == 0, done.err
    answer = done.json
    whole = exegpt(
        *TUNE, "--prefix-hit", 0.7, "--policy", "orca,chunked", "--max-num-seqs", 48, "--search", "exhaustive"
    )
    best = whole.json["estimate"]["throughput_tok_s"]
    assert answer["estimate"]["throughput_tok_s"] == pytest.approx(best, rel=0.01)
    schedule = read_schedule(out)
    assert schedule.prefix_caching and schedule.workload.prefix_hit == 0.7
    requests = [replace(request, arrival_s=0.0) for request in schedule.workload.draw(800)]
    run = replay(schedule, rooflines.found_on(schedule), requests, timeline=False)
    assert answer["estimate"]["throughput_tok_s"] == pytest.approx(steady_tokens_s(run.served), rel=0.03)
    without = exegpt(*TUNE, "--policy", "orca,chunked", "--max-num-seqs", 48).json["estimate"]
    assert without["throughput_tok_s"] < 0.8 * best
    again = exegpt("simulate", "--schedule", out, "--json")
    assert again.json["throughput_tok_s"] == pytest.approx(answer["estimate"]["throughput_tok_s"], rel=1e-6)
    assert not any("ignores prefix caching" in text for text in again.json["assumptions"])
    assert any(text.startswith("prefix hit: 70% of the prompts' tokens") for text in again.json["assumptions"])
    assert "70% of the prompts cached" in " ".join(exegpt("show", out).out.split())
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,input,output\n0,900,10\n9,900,10\n18,900,10\n")
    assert exegpt("simulate", "--schedule", out, "--replay", trace, "--json").json["cached_share"] > 0.4
    turns = exegpt("simulate", "--schedule", out, "--agents", 5, "--turns", 4)
    assert turns.code == 2 and "the schedule was made for a share of 70%" in turns.err
    refused = exegpt("simulate", "--schedule", out, "--prefix-hit", 0.5)
    assert refused.code == 2 and "The schedule file determines --prefix-hit: leave --prefix-hit 0.5" in refused.err


def test_requests_of_traces_and_agents_find_the_share(exegpt, tmp_path):
    engine = ("simulate", *MODEL, "--max-num-seqs", 32, "--json")
    done = exegpt(*engine, "-w", "640/20", "--prefix-hit", 0.5, "--agents", 8)
    assert done.json["cached_share"] == pytest.approx(0.5, rel=0.01)
    path = tmp_path / "t.csv"
    path.write_text("input,output,arrival_s\n" + "".join(f"{320 + 16 * i},5,{i}\n" for i in range(20)))
    done = exegpt(*engine, "--replay", path, "--prefix-hit", 0.25)
    assert done.json["cached_share"] == pytest.approx(0.25, abs=0.03)


@pytest.mark.slow
def test_a_rate_is_higher_with_a_share(exegpt):
    rated = ("tune", *MODEL, "-w", "900/60", "--ttft", "1s", "--rate", "4/s", "--policy", "orca", "--json")
    goodputs = [
        exegpt(*rated, "--max-num-seqs", 32, *options).json["goodput_seq_s"] for options in ((), ("--prefix-hit", 0.7))
    ]
    assert goodputs[1] > 1.3 * goodputs[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*TUNE, "--policy", "rra,orca"), "--prefix-hit 0.6 works with orca, chunked, but --policy includes rra"),
        (
            ("tune", "-m", "t5-3b", "-c", "1xA40", "-w", "T", "-l", "9s"),
            "0.6 requires a decoder-only model, but 't5-3b'",
        ),
        (
            ("simulate", *MODEL, "-w", "T", "--policy", "static", "--encode-batch", 4),
            "--prefix-hit 0.6 requires one of the policies orca, chunked, but the policy is static",
        ),
        (
            ("simulate", *MODEL, "-w", "T", "--max-num-seqs", 4, "--no-prefix-caching"),
            "--no-prefix-caching contradicts --prefix-hit 0.6",
        ),
        (("simulate", *MODEL, "-w", "T", "--agents", 4, "--turns", 3), "--turns 3 says what prompts find"),
    ],
)
def test_what_cannot_cache_is_refused_by_name(exegpt, words, message):
    done = exegpt(*words, "--prefix-hit", 0.6)
    assert done.code == 2 and message in done.err and done.err.count("\n") == 1


def test_a_trace_that_says_what_its_prompts_share_needs_no_share(exegpt, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({"input": 40, "output": 3, "session_id": "a"}) + "\n" for _ in range(2)))
    done = exegpt("simulate", *MODEL, "--replay", path, "--max-num-seqs", 4, "--prefix-hit", 0.6)
    assert (
        done.code == 2 and "t.jsonl says which prompts begin with the same tokens: leave --prefix-hit out" in done.err
    )
