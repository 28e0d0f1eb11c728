"""`tune` for requests that arrive over time: goodput, clusters by price, and what can't be asked together."""

import json

import pytest

from tests.exegpt.cli.test_bad_inputs import check_refused
from xscheduler.ties import TIE

POLICY = ("--policy", "chunked", "--model", "opt-13b")


@pytest.fixture(scope="session")
def trace(tmp_path_factory):
    """Two hundred requests, ten every second."""
    path = tmp_path_factory.mktemp("traces") / "t.csv"
    rows = (f"{100 + i % 50},{10 + i % 7},{i // 10}" for i in range(200))
    path.write_text("input,output,arrival_s\n" + "\n".join(rows) + "\n")
    return path


@pytest.fixture
def prices(tmp_path):
    path = tmp_path / "prices.yaml"
    path.write_text("A40: 1\nL40S: 1.5\nH100-SXM: 10\n")
    return path


def test_a_rate_is_answered_by_goodput(exegpt, trace, tmp_path):
    command = ("tune", "-l", "4s", *POLICY, "-w", trace, "--arrivals", "trace", "-c", "1xA40")
    done = exegpt(*command, "--out", tmp_path / "s.json", "--json")
    assert done.code == 0, done.err
    answer = done.json
    assert answer["rate_seq_s"] == pytest.approx(199 / 19)  # the trace's own
    assert answer["goodput_seq_s"] >= answer["rate_seq_s"]
    assert answer["estimate"]["latency_from"] == "arrival" and answer["estimate"]["latency_s"] <= 4
    (arrivals,) = [text for text in answer["assumptions"] if "event simulator" in text]
    assert "over 200 requests" in arrivals and "so few requests, percentiles are unreliable" in arrivals
    assert answer["alternatives"][0]["goodput_seq_s"] == answer["highest_rate_seq_s"] == answer["goodput_seq_s"]
    assert json.loads((tmp_path / "s.json").read_text()) == answer["schedule"]
    assert "chunked: sustains" in exegpt(*command).out


def test_a_rate_takes_growth_and_prefixes(exegpt, tmp_path):
    path = tmp_path / "t.csv"
    rows = (f"{400 + i % 50},{10 + i % 7},{i / 10},{i % 5},384" for i in range(600))
    path.write_text("input,output,arrival_s,prefix_id,prefix_tokens\n" + "\n".join(rows) + "\n")
    command = ("tune", "--ttft", "1s", "-m", "opt-1.3b", "-c", "1xA40", "-w", path, "--arrivals", "trace", "--json")
    plain = exegpt(*command, "--policy", "orca").json
    caching = exegpt(*command, "--policy", "orca", "--admission", "grow", "--prefix-caching").json
    assert caching["schedule"]["admission"] == "grow" and caching["schedule"]["prefix_caching"]
    assert caching["goodput_seq_s"] > 2 * plain["goodput_seq_s"]
    assert any("an unlimited cache would hold" in text for text in caching["assumptions"])
    assert {a["policy"] for a in exegpt(*command, "--prefix-caching").json["alternatives"]} == {"orca", "chunked"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("-m", "opt-1.3b"), "--prefix-caching is for requests that arrive over time: add --rate"),
        (("-m", "opt-1.3b", "--rate", "5/s", "--policy", "rra,orca"), "--prefix-caching works with orca, chunked"),
        (("-m", "t5-11b", "--rate", "5/s"), "'t5-11b' has an encoder"),
    ],
)
def test_prefixes_that_a_search_can_not_cache_are_refused(exegpt, more, said):
    check_refused(exegpt("tune", "-l", "5s", "-c", "1xA40", "-w", "T", "--prefix-caching", *more), said)


def test_line_1_a_schedule_that_full_batches_would_hide_is_found(exegpt, tmp_path):
    """Bounds on both tokens: what keeps them at a rate would miss them if requests always waited."""
    command = ("tune", "-w", "2048/256", "-m", "llama-3.1-8b", "-c", "1xH100-SXM", "-l", "5s", "--policy", "chunked")
    command += ("--ttft", "200ms", "--tpot", "20ms", "--json")
    done = exegpt(*command, "--rate", "1/s")
    assert done.code == 0, done.err
    answer = done.json
    assert answer["goodput_high_seq_s"] >= answer["goodput_seq_s"] > 1
    (chunked,) = answer["alternatives"]
    assert chunked["goodput_seq_s"] == answer["goodput_seq_s"] < chunked["steady_throughput_seq_s"]
    assert answer["estimate"]["ttft_p99_s"] <= 0.2 and answer["estimate"]["tpot_p99_s"] <= 0.02
    search = answer["search"]
    assert 0 < search["evaluations"] <= search["space"] and search["replays"] > 0
    (assumption,) = [text for text in answer["assumptions"] if "standard errors" in text]
    assert assumption.startswith("goodput:")


def test_an_exhaustive_search_at_a_rate_is_done_or_refused(exegpt, trace):
    command = ("tune", "-l", "4s", "-w", trace, "--arrivals", "trace", "-c", "1xA40", "--model", "opt-13b")
    check_refused(exegpt(*command, "--search", "exhaustive", "--gpu-memory-fraction", 1), "more than 20,000")
    check_refused(exegpt(*command, "--search", "optuna"), "does not support arrival rates")
    every = exegpt(*command, "--search", "exhaustive", "--policy", "static", "--json").json
    quick = exegpt(*command, "--policy", "static", "--json").json
    assert every["search"]["method"] == "exhaustive" and quick["search"]["method"] == "racing"
    assert every["search"]["evaluations"] <= every["search"]["space"] == quick["search"]["space"]
    assert quick["highest_rate_seq_s"] >= 0.99 * every["highest_rate_seq_s"] > 0


def test_line_8_of_policies_that_are_as_good_the_simplest_is_the_answer(exegpt):
    """One token each: RRA, Orca and static batches encode alike."""
    command = ("tune", "-l", "inf", "-w", "1500/1", "-m", "llama-3.1-8b", "-c", "1xH100-SXM", "--no-advice", "--json")
    command += ("--engine", "none")  # one's time per iteration favours larger batches
    answer = exegpt(*command, "--policy", "static,rra,orca").json
    rates = {a["policy"]: a["estimate"]["throughput_tok_s"] for a in answer["alternatives"]}
    assert rates["orca"] >= max(rates.values()) * (1 - TIE)
    assert answer["schedule"]["policy"] == "orca"
    assert exegpt(*command, "--policy", "static,rra").json["schedule"]["policy"] == "rra"


def test_line_7_token_budgets_go_as_far_as_memory(exegpt):
    command = ("tune", "-l", "inf", "-w", "2048/256", "-m", "llama-3.1-405b", "-c", "4x8xH100-SXM", "--json")
    answer = exegpt(*command, "--policy", "chunked,orca", "--no-advice", "--engine", "none").json
    by_policy = {a["policy"]: (a["estimate"]["throughput_seq_s"], a["schedule"]) for a in answer["alternatives"]}
    assert by_policy["chunked"][0] > 0.97 * by_policy["orca"][0]
    assert by_policy["chunked"][1]["control"]["max_num_batched_tokens"] > 8192


def test_a_rate_that_nothing_sustains_is_exit_3_with_the_highest(exegpt, trace):
    command = ("tune", "-l", "4s", *POLICY, "-w", trace, "--arrivals", "trace", "-c", "1xA40", "--rate", "900/s")
    done = exegpt(*command, "--json")
    assert done.code == 3
    assert done.json["schedule"] is None and 0 < done.json["highest_rate_seq_s"] < 900
    summary = exegpt(*command)
    assert summary.code == 3 and "the highest sustained rate is" in summary.err
    low = exegpt(*command[:1], "-l", "1ms", *command[3:])
    assert low.code == 3 and "lowest reachable latency" in low.err


def test_the_cheapest_cluster_that_sustains_the_rate_is_the_answer(exegpt, trace, prices):
    command = ("tune", "-l", "4s", *POLICY, "-w", trace, "--arrivals", "trace", "--rate", "40/s")
    done = exegpt(*command, "-c", "1xH100-SXM,1xA40,2xA40,1xL40S", "--price", prices, "--json")
    assert done.code == 0, done.err
    answer = done.json
    meets = [c for c in answer["clusters"] if c["schedule"]]
    assert 0 < len(meets) < 4
    assert [c["price_per_hour"] for c in meets] == sorted(c["price_per_hour"] for c in meets)
    assert answer["cheapest"] == answer["cluster"] == meets[0]["cluster"]
    assert answer["schedule"] == meets[0]["schedule"]
    assert {c["cluster"]: c["price_per_hour"] for c in answer["clusters"]}["2xA40"] == 2
    mean = sum(10 + i % 7 for i in range(200)) / 200
    expected = 1e6 * meets[0]["price_per_hour"] / (3600 * 40 * mean)
    assert meets[0]["price_per_million_output_tokens"] == pytest.approx(expected)
    assert all(c["price_per_million_output_tokens"] is None for c in answer["clusters"] if not c["schedule"])


def test_without_prices_the_smallest_cluster_comes_first(exegpt, trace):
    command = ("tune", "-l", "4s", *POLICY, "-w", trace, "--arrivals", "trace", "-c", "2xA40,1xA40")
    answer = exegpt(*command, "--json").json
    assert [c["cluster"] for c in answer["clusters"]] == ["1xA40", "2xA40"] and answer["cheapest"] is None
    done = exegpt(*command)
    assert "without prices" in done.err and "Best on 1xA40" in done.out


def test_what_does_not_go_together_is_refused(exegpt, trace, prices, tmp_path):
    (tmp_path / "bad.yaml").write_text("A40: free\n")
    (tmp_path / "at_once.csv").write_text("input,output\n5,5\n6,6\n")
    for command, message in (
        ("-l 5s -c 1xA40,2xA40", "add --rate"),
        (f"-l 5s --price {prices} -c 1xB200", "no price of B200"),
        ("-l 5s --rate 5/s,x", "'x' is not an arrival rate"),
        ("-l 5s --rate 0/s", "'0/s'"),
        ("-l 5s --rate 5/s --tolerance 0.1", "leave --tolerance 0.1 out"),
        ("-l 5s --arrivals bursts", "'bursts'"),
        ("-l 5s --arrivals trace", "has no arrivals"),
        (f"-l 5s --arrivals trace --rate 5/s -w {tmp_path}/at_once.csv", "has no arrivals"),
        (f"-l 5s --rate 5/s --price {tmp_path}/bad.yaml", "'free' is not a price"),
        (f"-l 5s --rate 5/s --price {tmp_path}/gone.yaml", "no price file"),
        (f"-l 5s --rate 5/s -c 1xRTX4090,1xA40 --price {prices}", "no price of RTX4090"),
        ("-l 5s --rate 5/s -c 1xA40,,2xA40", "'' is not a cluster"),
    ):
        check_refused(exegpt("tune", *command.split()), message)


def test_several_bounds_and_rates_have_the_answers_of_single_calls(exegpt, trace, prices, tmp_path):
    command = ("tune", *POLICY, "-w", trace, "--arrivals", "trace", "-c", "1xA40,2xA40", "--price", prices, "--json")
    both = exegpt(*command, "-l", "3s,6s", "--rate", "8/s,1000/s", "--out", tmp_path / "s.json")
    assert both.code == 0, both.err
    asked = [(answer["latency_bound_s"], answer["rate_seq_s"]) for answer in both.json["frontier"]]
    assert asked == [(3.0, 8.0), (3.0, 1000.0), (6.0, 8.0), (6.0, 1000.0)]
    alone = exegpt(*command, "-l", "6s", "--rate", "8/s").json
    same = ("schedule", "estimate", "goodput_seq_s", "price_per_hour", "price_per_million_tokens", "cheapest")
    assert {key: both.json["frontier"][2][key] for key in same} == {key: alone[key] for key in same}
    assert alone["price_per_million_tokens"] < alone["price_per_million_output_tokens"]
    assert both.json["frontier"][3]["schedule"] is None  # no cluster serves a thousand requests per second
    assert json.loads((tmp_path / "s.json").read_text()) == alone["schedule"]


def test_an_answer_without_a_rate_has_prices_at_full_throughput(exegpt, prices):
    done = exegpt("tune", *POLICY, "-l", "12s", "-w", "512/32", "-c", "2xA40", "--price", prices, "--json").json
    assert done["price_per_hour"] == 2.0
    tokens = 3600 * done["estimate"]["throughput_tok_s"]
    assert done["price_per_million_output_tokens"] == pytest.approx(1e6 * 2.0 / tokens)
    assert done["price_per_million_tokens"] == pytest.approx(1e6 * 2.0 / (tokens * (512 + 32) / 32))
