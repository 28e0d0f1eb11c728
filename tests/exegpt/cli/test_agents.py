"""`simulate --agents`: sessions in a closed loop."""

import json

import pytest

from exegpt.api.library import simulate, tune
from xcore.errors import InputError

ENGINE = ("simulate", "-m", "opt-1.3b", "-c", "1xA40", "--max-num-seqs", 8, "--prefix-caching", "--admission", "grow")


def test_turns_of_a_trace_follow_their_last_ones_end(exegpt, tmp_path):
    path, out = tmp_path / "t.csv", tmp_path / "out.jsonl"
    rows = [(100, 20, "a", ""), (200, 30, "b", ""), (150, 20, "a", 0.5), (90, 9, "c", 2), (260, 10, "b", "")]
    path.write_text("input,output,session_id,after_s\n" + "\n".join(",".join(map(str, row)) for row in rows))
    command = (*ENGINE, "--replay", path, "--agents", 2, "--tool-time", "250ms")
    done = exegpt(*command, "--out", out, "--json")
    assert done.code == 0, done.err
    times = {row["id"]: row for row in map(json.loads, out.read_text().splitlines())}
    first_end = min(times[2]["finish_s"], times[4]["finish_s"])
    arrivals = [0.0, 0.0, times[0]["finish_s"] + 0.5, first_end + 2, times[1]["finish_s"] + 0.25]
    assert [times[i]["arrival_s"] for i in range(5)] == pytest.approx(arrivals)
    assert times[2]["cached_tokens"] == 112 and times[4]["cached_tokens"] == 224
    found = sum(row["cached_tokens"] for row in times.values()) / sum(row[0] for row in rows)
    assert done.json["cached_share"] == pytest.approx(found) and done.json["agents"] == 2
    spans = [times[2]["finish_s"], times[4]["finish_s"], times[3]["finish_s"] - times[3]["arrival_s"]]
    assert done.json["sessions"]["count"] == 3
    assert done.json["sessions"]["completion"]["mean"] == pytest.approx(sum(spans) / 3)
    text = exegpt(*command)
    assert "completion of a session" in text.out and "closed loop: 2 agents run 3 sessions" in " ".join(
        text.err.split()
    )


def test_drawn_sessions_keep_all_agents_busy(exegpt):
    done = exegpt(*ENGINE, "-w", "60/20", "--agents", 6, "--turns", 5, "--tool-time", "100ms", "--json")
    assert done.code == 0, done.err
    facts = done.json
    assert facts["requests"] == 1000 and facts["sessions"]["count"] == 200 and facts["cached_share"] > 0.5
    # Little's law: all six agents wait for turns or for their tools, but before a session.
    turn_s = facts["latency"]["mean"] + 0.1 * 4 / 5
    assert facts["full_load"]["throughput_seq_s"] * turn_s == pytest.approx(6, rel=0.02)
    assert facts["full_load"]["requests"] > 950


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--turns", 4), "--turns 4 is about sessions in a closed loop: add --agents"),
        (("--tool-time", "1s"), "--tool-time 1s is about sessions"),
        (("--agents", 4, "--rate", "3/s"), "--rate 3/s needs requests with fixed arrivals"),
        (("--agents", 4, "--timeline", "t.json"), "--timeline 't.json' needs requests"),
        (("--agents", 4, "--replay", "t.csv", "--turns", 2), "--turns 2 is for sessions that are drawn"),
        (("--agents", 4, "--tool-time", "inf"), "--tool-time inf is not a delay"),
        (("--agents", 90_000, "--turns", 900), "their product at most 2,000,000"),
    ],
)
def test_what_contradicts_a_closed_loop_is_refused(exegpt, options, message):
    done = exegpt(*ENGINE, "-w", "60/20", *options)
    assert done.code == 2 and message in done.err


def test_python_refuses_what_the_command_does():
    where = {"max_num_seqs": 8}
    for wrong in ({"agents": 0}, {"agents": -3}, {"agents": 2, "turns": 0}):
        with pytest.raises(InputError, match="must be at least 1"):
            simulate("opt-1.3b", "1xA40", "60/20", **where, **wrong)
    assert simulate("opt-1.3b", "1xA40", "60/20", **where, agents=2, tool_time=0.5).facts["agents"] == 2
    found = tune("opt-1.3b", "1xA40", "60/20", agents=2, turns=3, tool_time=0.5, policy="orca")
    turn_s = found.estimate.latency_mean_s + 0.5 * 2 / 3  # two of three turns have a tool before them
    assert found.schedule.prefix_caching and found.estimate.throughput_seq_s == pytest.approx(2 / turn_s, rel=0.01)


TUNE = ("tune", "-m", "opt-1.3b", "-c", "1xA40", "-w", "60/20", "--turns", 5, "--tool-time", "100ms")


def test_tune_finds_a_schedule_for_agents_and_simulate_agrees(exegpt, tmp_path):
    plan = tmp_path / "plan.json"
    bounds = ("--policy", "chunked,orca", "-l", "400ms", "--tpot", "20ms")
    asked = (*TUNE, "--agents", 6, *bounds)
    done = exegpt(*asked, "--out", plan, "--json")
    assert done.code == 0, done.err
    found, estimate = done.json, done.json["estimate"]
    assert found["agents"] == 6 and found["cached_share"] > 0.5 and estimate["tpot_bounded_s"] <= 0.02
    assert {a["policy"]: a["cached_share"] > 0.5 for a in found["alternatives"]} == {"orca": True, "chunked": True}
    assert found["schedule"]["prefix_caching"] is True and found["search"]["replays"] > 50
    assert found["most_agents"] > 6 and found["most_agents_or_more"] is False
    again = exegpt("simulate", "--schedule", plan, "--agents", 6, "--turns", 5, "--tool-time", "100ms", "--json").json
    assert again["full_load"]["throughput_seq_s"] == pytest.approx(estimate["throughput_seq_s"], rel=0.02)
    assert again["cached_share"] == pytest.approx(found["cached_share"], abs=0.02)
    text = exegpt(*asked)
    shown = " ".join(text.out.split())
    assert f"the bounds hold for up to {found['most_agents']} agents" in shown and "turns/s" in shown
    assert "closed loop: 6 agents run 200 sessions of 5 turns" in " ".join(text.err.split())


def test_tune_says_how_many_agents_the_closest_schedule_serves(exegpt, tmp_path):
    """Sessions of a trace, which are repeated: three agents and 1,000 turns need more than it has."""
    path = tmp_path / "t.csv"
    rows = [(100, 20, "a"), (200, 30, "b"), (150, 20, "a"), (90, 9, "c"), (260, 10, "b")]
    path.write_text("input,output,session_id\n" + "\n".join(",".join(map(str, row)) for row in rows))
    asked = ("tune", "-m", "opt-1.3b", "-c", "1xA40", "-w", path, "--agents", 3, "--policy", "orca")
    done = exegpt(*asked, "--ttft", "12ms")
    shown = " ".join((done.out + done.err).split())
    assert done.code == 3 and "No schedule keeps the bounds for 3 agents" in shown
    assert "some of them repeated with new texts" in shown
    free = exegpt(*asked, "--json").json
    assert free["most_agents"] is None and free["cached_share"] == pytest.approx((112 + 224) / 800, abs=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--turns", 4), "--turns 4 is about sessions in a closed loop: add --agents"),
        (("--agents", 4, "--rate", "3/s"), "--rate 3/s has arrivals of its own, but with --agents 4"),
        (("--agents", 4, "--devices", "any"), "--agents 4 can't be combined with --devices"),
        (("--agents", 4, "-l", "2s,4s"), "--agents 4 can't be combined with several bounds"),
        (("--agents", 4, "--search", "optuna"), "--agents 4 can't be combined with --search optuna"),
        (("--agents", 4, "--turns", 3, "--prefix-hit", 0.5), "--turns 3 says what prompts find in the cache"),
        (("--agents", 4, "--prefix-caching", "--policy", "rra"), "--prefix-caching works with orca, chunked"),
    ],
)
def test_what_a_search_for_agents_excludes_is_refused(exegpt, options, message):
    done = exegpt("tune", "-m", "opt-1.3b", "-c", "1xA40", "-w", "60/20", *options)
    assert done.code == 2 and message in done.err and "Traceback" not in done.err
