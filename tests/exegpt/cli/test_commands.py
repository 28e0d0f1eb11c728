"""The commands end to end on a tiny model: what they print, what they leave, and the shape of their JSON."""

import json

import pytest

from xcore.console.comparison import KEYS
from xcore.policies.registry import TRAITS
from xcore.tokenizer import load_tokenizer
from xscheduler.ties import TIE
from xscheduler.tune import POLICIES

SCHEDULE_KEYS = set(
    "version policy control tp_degree tp_gpus encode_tp_degree encode_tp_gpus kv_blocks "
    "block_size replicas admission prefix_caching stages dtype kv_dtype latency_bound_s ttft_bound_s tpot_bound_s "
    "bound percentile model cluster workload profile".split()
)
ESTIMATE_KEYS = {*KEYS} | set("latency_from memory_bytes utilisation binding feasible violations".split())
PROVENANCE_KEYS = {"exegpt", "torch", "transformers", "triton", "profile", "seed", "command_line"}


def test_tune_answers_without_arguments(exegpt):
    done = exegpt("tune", "--latency-bound", "inf")
    assert done.code == 0
    assert "model: opt-13b, the default" in done.err and "cluster: 4xA40, the default" in done.err
    assert "task S" in done.err and "roofline" in done.err
    assert "rra" in done.out and "static" in done.out and "Best:" in done.out


def test_tune_json_has_its_shape(exegpt, tmp_path):
    command = ("tune", "-l", "20s", "-m", "opt-1.3b", "-c", "2xA40", "--no-advice", "--json")
    done = exegpt(*command, "--out", tmp_path / "s.json")
    answer = done.json
    assert done.code == 0
    assert {"schedule", "estimate", "alternatives", "search", "assumptions", "provenance"} <= answer.keys()
    assert answer["schedule"].keys() == SCHEDULE_KEYS
    assert answer["estimate"].keys() >= ESTIMATE_KEYS
    assert answer["estimate"]["latency_s"] <= 20 and answer["schedule"]["latency_bound_s"] == 20
    assert {"method", "evaluations", "space", "seconds"} <= answer["search"].keys()
    assert {a["policy"] for a in answer["alternatives"]} == set(POLICIES)
    own, same = {"model", "workload"}, answer["estimate"]["engine"]
    for other in (a for a in answer["alternatives"] if a["schedule"]):
        shared = own | ({"cluster", "profile"} if other["estimate"]["engine"] == same else set())
        keys = SCHEDULE_KEYS | ({"adjust"} if TRAITS[other["policy"]].adjustable else set())
        assert other["schedule"].keys() == keys - shared, "what another engine has of its own is there"
    assert all(a["reason"] for a in answer["alternatives"])
    assert answer["provenance"].keys() >= PROVENANCE_KEYS
    assert answer["provenance"]["profile"]["source"] == "roofline"
    assert json.loads((tmp_path / "s.json").read_text()) == answer["schedule"]
    best = max(a["estimate"]["throughput_tok_s"] for a in answer["alternatives"] if a["schedule"])
    assert best * (1 - TIE) <= answer["estimate"]["throughput_tok_s"] <= best


def test_a_report_names_the_bound_and_the_profile(exegpt, tmp_path):
    """A report of one policy draws its searches under other bounds too."""
    command = ("tune", "-l", "20s", "-m", "opt-1.3b", "-c", "2xA40", "--policy", "static", "--no-advice")
    assert exegpt(*command, "--report", tmp_path / "r.html").code == 0
    page = (tmp_path / "r.html").read_text()
    assert page.startswith("<!doctype html>") and "20 s for 99% of all requests" in page and "roofline" in page


@pytest.mark.slow
def test_one_reason_is_printed_unless_explain_is_given(exegpt):
    """`--json` has each policy's reasons as `--explain` prints them."""
    command = ("tune", "-l", "12s", "--policy", "orca,chunked,rra,static", "--no-advice")
    short, full = exegpt(*command).out, exegpt(*command, "--explain").out
    answer = exegpt(*command, "--json").json
    best = answer["schedule"]["policy"]
    for other in answer["alternatives"]:
        policy, reason = other["policy"], other["reason"]
        (line,) = [line for line in short.splitlines() if line.startswith(f"  {policy}: ")]
        assert f"  {policy}: {reason}" in full.splitlines()
        assert ";" not in line and len(line) < 130
        clause = line.removeprefix(f"  {policy}: ")
        assert reason.endswith(f"; {clause}") if policy == best else reason.startswith(f"{clause}; ")
        assert ("limited by" in line) == (policy == best)
    assert "a batch runs until its longest output ends" in full and "longest output" not in short
    assert "--explain" in short and "--explain" not in full
    assert exegpt(*command, "--explain", "--json").json["alternatives"] == answer["alternatives"]


def test_several_bounds_give_the_frontier(exegpt):
    done = exegpt("tune", "-l", "1ms,15s,inf", "--policy", "rra,static", "--json")
    frontier = done.json["frontier"]
    assert done.code == 0 and len(frontier) == 3
    assert frontier[0]["schedule"] is None
    rates = [a["estimate"]["throughput_seq_s"] for a in frontier[1:]]
    assert rates == sorted(rates)
    assert done.json["provenance"].keys() >= PROVENANCE_KEYS
    printed = exegpt("tune", "-l", "1ms,15s,inf", "--policy", "rra,chunked", "--export", "vllm").out
    assert "No schedule meets the bound of 1ms" in printed and "behind" not in printed
    assert printed.count("vllm serve") == 2 and "Under 15s:" in printed and "Under inf:" in printed


def test_a_bound_that_nothing_meets_names_the_lowest_latency(exegpt):
    done = exegpt("tune", "-l", "1ms", "--policy", "rra", "--json")
    assert done.code == 3
    answer = done.json
    assert answer["schedule"] is None and answer["estimate"] is None
    assert answer["lowest_latency_s"] > 0.001
    lowest = answer["lowest_latency_s"]
    assert exegpt("tune", "-l", f"{lowest * 0.999 * 1e3:.6f}ms", "--policy", "rra").code == 3
    assert exegpt("tune", "-l", f"{lowest * 1.001 * 1e3:.6f}ms", "--policy", "rra").code == 0
    refused = exegpt("tune", "-l", "1ms", "--policy", "rra")
    assert refused.code == 3 and "lowest reachable latency" in refused.err


def test_a_schedule_can_be_simulated(exegpt, tiny_schedule, tiny_profile, tmp_path):
    done = exegpt("simulate", "-s", tiny_schedule, "-p", tiny_profile, "--timeline", tmp_path / "t.json", "--json")
    assert done.code == 0
    assert done.json.keys() >= ESTIMATE_KEYS
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {"encode", "decode"} <= {e["name"] for e in events}


def test_a_replayed_trace_is_scaled_to_the_models_context_on_request(exegpt, tiny_schedule, tiny_profile, tmp_path):
    """The context is 128 tokens."""
    command = ("simulate", "-s", tiny_schedule, "-p", tiny_profile, "--replay", tmp_path / "t.csv", "--json")
    (tmp_path / "t.csv").write_text("input,output\n" + "512,512\n" * 9)
    done = exegpt(*command)
    assert done.code == 2 and "None of the 9 rows of t.csv fits the context of" in done.err
    command = (*command, "--scale-to-context")
    answer = exegpt(*command).json
    assert any("multiplied by 0.125 to fit the context of 128 tokens" in text for text in answer["assumptions"])
    assert answer["throughput_tok_s"] == pytest.approx(9 * 64 / answer["seconds"])
    (tmp_path / "t.csv").write_text("input,output\n" + "20,20\n" * 199 + "120,20\n")
    answer = exegpt(*command).json
    assert any("0.5% of the requests are longer than the context" in text for text in answer["assumptions"])
    assert answer["throughput_tok_s"] == pytest.approx((199 * 20 + 8) / answer["seconds"])


@pytest.mark.parametrize("order", ["fcfs", "edf"])
def test_replayed_rows_beyond_the_context_are_left_out_with_their_labels(
    exegpt, tiny_schedule, tiny_profile, tmp_path, order
):
    (tmp_path / "t.csv").write_text("input,output,deadline_s\n20,20,5\n120,20,1\n" + "20,20,9\n" * 8)
    command = ("simulate", "-s", tiny_schedule, "-p", tiny_profile, "--order", order, "--json")
    answer = exegpt(*command, "--replay", tmp_path / "t.csv").json
    assert answer["requests"] == 9
    (text,) = [text for text in answer["assumptions"] if "context" in text]
    assert text.startswith(
        "warning: 1 of 10 rows of t.csv are longer than the context of 128 tokens and are left out, 10% of"
    )


@pytest.mark.parametrize("policy", ["chunked", "orca"])
def test_a_running_engines_settings_can_be_simulated(exegpt, tiny, tiny_profile, tmp_path, policy):
    (tmp_path / "t.csv").write_text("input,output\n" + "20,10\n" * 9)
    command = ("simulate", "--policy", policy, "-m", tiny, "-p", tiny_profile, "--max-num-seqs", 4, "--json")
    free = exegpt(*command, "--replay", tmp_path / "t.csv").json
    assert free["requests"] == 9
    # two blocks of 16 tokens hold one request of 29 tokens: one after the other
    tight = exegpt(*command, "--replay", tmp_path / "t.csv", "--kv-blocks", 2).json
    assert tight["seconds"] > 1.5 * free["seconds"]
    assert exegpt(*command, "-w", "20/10").json.keys() >= ESTIMATE_KEYS


def test_a_trace_can_be_replayed(exegpt, tiny_schedule, tiny_profile, tmp_path):
    (tmp_path / "t.csv").write_text("input,output,arrival_s\n" + "".join(f"{20 + i},10,{i / 9}\n" for i in range(9)))
    done = exegpt("simulate", "-s", tiny_schedule, "-p", tiny_profile, "--replay", tmp_path / "t.csv", "--json")
    facts = done.json
    assert facts["requests"] == 9 and facts["seconds"] > 8 / 9
    assert facts["throughput_tok_s"] == pytest.approx(90 / facts["seconds"])
    printed = exegpt("simulate", "-s", tiny_schedule, "-p", tiny_profile, "--replay", tmp_path / "t.csv").out
    assert "9 requests of t.csv in" in printed and "since arrival" in printed
    for key in ("ttft", "tpot", "latency"):
        assert facts[key].keys() == {"mean", "p50", "p90", "p95", "p99"}
        assert 0 < facts[key]["p50"] <= facts[key]["p99"]


def test_requests_are_run_and_measured(exegpt, tiny, tiny_schedule, tiny_profile, tmp_path):
    lines = [
        {"id": "text", "prompt": "hello", "max_tokens": 5},
        {"id": "ids", "prompt_ids": [5, 9, 7], "max_tokens": 8, "ignore_eos": True},
        {"id": "one", "prompt_ids": [1], "max_tokens": 1},
    ]
    grammar = {"logprobs": 2, "prompt_logprobs": True, "grammar": "start: /a{3}/", "temperature": 1, "min_p": 0.1}
    asking = {"id": "asking", "prompt_ids": [1, 2], "max_tokens": 9, "stop_token_ids": [3], **grammar}
    lines.append(asking | {"logit_bias": {"70": 5}, "frequency_penalty": 1, "presence_penalty": 1, "min_tokens": 2})
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out, report = tmp_path / "out.jsonl", tmp_path / "report.html"
    command = ("run", "-m", tiny, "-r", tmp_path / "r.jsonl", "-s", tiny_schedule, "-p", tiny_profile, "--out", out)
    done = exegpt(*command, "--report", report, "--json")
    assert done.code == 0, done.err
    answer = done.json
    assert answer.keys() >= {*ESTIMATE_KEYS, "requests", "tokens", "seconds", "predicted", "predicted_steady", "error"}
    assert answer["requests"] == 4
    assert answer["predicted"].keys() >= ESTIMATE_KEYS and answer["error"].keys() == {*KEYS}
    measured, predicted = answer["throughput_tok_s"], answer["predicted"]["throughput_tok_s"]
    assert answer["error"]["throughput_tok_s"] == pytest.approx((measured - predicted) / measured)
    rows = {row["id"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert rows.keys() == {"text", "ids", "one", "asking"}
    asked = {key: rows["asking"].pop(key) for key in ("logprobs", "likeliest", "prompt_logprobs", "prompt_likeliest")}
    assert rows["asking"]["text"] == "aaa" and rows["asking"]["finish_reason"] == "stop"
    assert {key: len(value) for key, value in asked.items()} == dict(zip(asked, (3, 3, 2, 2), strict=True))
    assert asked["prompt_logprobs"][0] is None and asked["prompt_likeliest"][0] == []
    assert all(value < 0 for value in asked["logprobs"]) and {len(row) for row in asked["likeliest"]} == {2}
    assert len(rows["ids"]["output_ids"]) == 8 and len(rows["one"]["output_ids"]) == 1
    assert rows["text"]["prompt_tokens"] == len(load_tokenizer(tiny).encode("hello")) and isinstance(
        rows["text"]["text"], str
    )
    for row in rows.values():
        assert row.keys() == set(
            "id prompt_tokens output_ids text finish_reason arrival_s start_s first_token_s finish_s".split()
        )
        assert 0 <= row["start_s"] <= row["first_token_s"] <= row["finish_s"]
    assert answer["tokens"] == sum(len(row["output_ids"]) for row in rows.values())
    assert "<svg" in report.read_text()
    assert exegpt("show", out, "--json").json["results"]["requests"] == 4
    assert "time to first token" in exegpt("show", out).out


def test_an_interrupted_run_is_resumed(exegpt, tiny, tiny_schedule, tiny_profile, tmp_path, monkeypatch):
    (tmp_path / "t.csv").write_text("input,output\n" + "12,6\n" * 12)
    out = tmp_path / "out.jsonl"
    command = ("run", "-m", tiny, "-r", tmp_path / "t.csv", "-s", tiny_schedule, "-p", tiny_profile, "--out", out)
    from xrunner.core import results

    append, count = results.ResultFile.append, 0

    def interrupted(self, result):
        nonlocal count
        count += 1
        if count > 5:
            raise KeyboardInterrupt
        append(self, result)

    monkeypatch.setattr(results.ResultFile, "append", interrupted)
    assert exegpt(*command).code == 130
    monkeypatch.setattr(results.ResultFile, "append", append)
    assert not out.exists() and (tmp_path / "out.jsonl.partial").read_text().count("\n") == 5
    refused = exegpt(*command)
    assert refused.code == 2 and "--resume" in refused.err
    other = exegpt(*command, "--seed", "1", "--resume")
    assert other.code == 2 and "another run" in other.err
    done = exegpt(*command, "--resume", "--json")
    assert done.code == 0, done.err
    assert done.json["requests"] == 7
    ids = [json.loads(line)["id"] for line in out.read_text().splitlines()]
    assert sorted(ids) == sorted(map(str, range(12)))


def test_a_run_without_a_schedule_tunes_first(exegpt, tiny, tiny_profile, tmp_path):
    (tmp_path / "t.csv").write_text("input,output\n" + "12,6\n" * 9)
    command = ("run", "-m", tiny, "-r", tmp_path / "t.csv", "-p", tiny_profile, "--json")
    assert exegpt(*command).json["requests"] == 9
    fixed = exegpt(*command, "--policy", "rra", "--encode-batch", 2, "--decode-iterations", 3).json["schedule"]
    assert (fixed["policy"], fixed["control"]["encode_batch"], fixed["control"]["decode_iterations"]) == ("rra", 2, 3)
    some = exegpt(*command, "--max-num-seqs", 4).json["schedule"]  # of all policies, those that have it
    assert some["policy"] in ("orca", "chunked") and some["control"]["max_num_seqs"] == 4
    large = exegpt(*command, "--policy", "orca", "--max-num-seqs", 64)  # more than there are requests
    assert large.code == 0 and large.json["schedule"]["control"]["max_num_seqs"] == 64, large.err
    impossible = exegpt(*command, "--latency-bound", "0.001ms")
    assert impossible.code == 3 and "lowest reachable latency" in impossible.err


def test_invalid_requests_are_skipped_on_demand(exegpt, tiny, tiny_schedule, tiny_profile, tmp_path):
    lines = [{"id": "a", "prompt_ids": [1] * 120, "max_tokens": 20}, {"id": "b", "prompt_ids": [1], "max_tokens": 2}]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out.jsonl"
    command = ("run", "-m", tiny, "-r", tmp_path / "r.jsonl", "-s", tiny_schedule, "-p", tiny_profile, "--out", out)
    refused = exegpt(*command)
    assert refused.code == 2 and "Request 'a' needs 140 tokens" in refused.err and not out.exists()
    assert exegpt(*command, "--skip-invalid").code == 0
    reasons = {row["id"]: row["finish_reason"] for row in map(json.loads, out.read_text().splitlines())}
    assert reasons["a"] == "error" and reasons["b"] in ("length", "stop")


def test_peers_serve_the_same_requests(exegpt, tiny, tiny_schedule, tiny_profile):
    command = ("bench", "-s", tiny_schedule, "-m", tiny, "-p", tiny_profile, "-n", 5, "--repeats", 1)
    done = exegpt(*command, "--peers", "transformers", "--json").json
    assert len(done["peers"]) == 3
    for row in done["peers"]:
        ours = done["policies"][0]["throughput_tok_s"]
        assert row["ratio"] == pytest.approx(ours / row["tokens_s"])
        assert row["alike"] == 1.0
    refused = exegpt(*command, "--peers", "hearsay")
    assert refused.code == 2
    assert "Peer 'hearsay' is not known: use one of transformers." in refused.err


@pytest.mark.slow
def test_policies_are_benched_side_by_side(exegpt, tiny, tiny_schedule, tiny_profile, tmp_path):
    report = tmp_path / "r.html"
    command = ("bench", "-s", tiny_schedule, "-m", tiny, "-p", tiny_profile, "-n", 6, "--repeats", 1, "--policy", "all")
    done = exegpt(*command, "--report", report, "--json")
    assert done.code == 0, done.err
    policies = done.json["policies"]
    assert policies[0]["policy"] == "rra"
    assert {p["policy"] for p in policies} == {"static", "hybrid", "orca", "chunked", "rra"}
    assert len({p["tokens"] for p in policies}) == 1
    assert "<svg" in report.read_text()
    done = exegpt(*command)
    assert "output tokens/s" in done.out and "6 requests, one run each." in done.out
    assert "not run: waa-c, waa-m: it needs at least two devices" in done.err


@pytest.mark.parametrize("what", ["models", "devices", "tasks", "policies"])
def test_what_is_built_in_is_listed(exegpt, what):
    rows = exegpt("list", what, "--json").json[what]
    assert len(rows) >= 4
    assert str(next(iter(rows[-1].values()))) in exegpt("list", what).out


def test_the_list_of_devices_names_the_origin_of_what_was_not_measured(exegpt):
    rows = {row["kind"]: row for row in exegpt("list", "devices", "--json").json["devices"]}
    assert (rows["H20"]["shares_from"], rows["H20"]["sheet"]) == ("H100-SXM", "corroborated")
    assert (rows["H100-SXM"]["shares_from"], rows["H100-SXM"]["links_from"]) == (None, None)
    assert (rows["B200"]["fp4_tflops"], rows["T4"]["bf16_tflops"], rows["V100-16GB-SXM"]["int8_tflops"]) == (
        9000,
        None,
        None,
    )


@pytest.mark.parametrize(
    ("arrival_s", "since", "ttft_s", "latency_s"), [(0, "start", 1, 3), (0.5, "arrival", 1.5, 3.5)]
)
def test_all_times_of_results_count_from_the_same_moment(exegpt, tmp_path, arrival_s, since, ttft_s, latency_s):
    result = {"id": "a", "prompt_tokens": 1, "output_ids": [1, 2], "finish_reason": "length", "arrival_s": arrival_s}
    result |= {"start_s": 1.0, "first_token_s": 2.0, "finish_s": 4.0}
    (tmp_path / "r.jsonl").write_text(json.dumps(result) + "\n")
    facts = exegpt("show", tmp_path / "r.jsonl", "--json").json["results"]
    assert (facts["latency_from"], facts["ttft_s"]["mean"], facts["latency_s"]["mean"]) == (since, ttft_s, latency_s)
    assert f"since {since}" in exegpt("show", tmp_path / "r.jsonl").out


def test_files_are_shown(exegpt, tiny_schedule, tiny_profile):
    schedule = exegpt("show", tiny_schedule, "--json").json
    assert schedule["kind"] == "schedule" and schedule["schedule"]["policy"] == "rra"
    profile = exegpt("show", tiny_profile, "--json").json
    assert profile["kind"] == "profile" and profile["profile"]["device"] == "cpu"
    text = exegpt("show", tiny_schedule).out
    assert "encode_batch" in text and "Stages" in text and "blocks of 16 tokens" in text


def test_a_schedules_stages_are_shown_with_how_busy_they_are(exegpt, tmp_path):
    command = ("tune", "-l", "inf", "-w", "C1", "--policy", "waa-c", "--no-advice", "--out", tmp_path / "s.json")
    assert exegpt(*command).code == 0
    facts = exegpt("show", tmp_path / "s.json", "--json").json["schedule"]
    assert {stage["phase"] for stage in facts["stages"]} == {"encode", "decode"}
    estimate = exegpt("simulate", "-s", tmp_path / "s.json", "--json").json
    assert facts["utilisation"] == [estimate["utilisation"][s["devices"][0]] for s in facts["stages"]]
    text = exegpt("show", tmp_path / "s.json").out
    assert "encode" in text and "0–39" in text and "%" in text


def test_what_a_profile_misses_is_shown(exegpt, tiny_profile):
    facts = exegpt("show", tiny_profile, "--json").json["profile"]
    assert any(text.startswith("host_copy") for text in facts["missing"])


def test_an_answer_has_advice_unless_switched_off(exegpt, tmp_path):
    command = ("tune", "-l", "5s", "--policy", "orca", "-c", "1xA40", "--report", tmp_path / "r.html")
    answer = exegpt(*command, "--json").json
    texts = " ".join(answer["advice"])
    assert "of the usable memory" in texts and "a bound of 7.5s" in texts and "2xA40" in texts and "1xL40S" in texts
    page = (tmp_path / "r.html").read_text()
    assert "Advice" in page and "Stages of the chosen schedule" in page and answer["advice"][0] in page
    assert exegpt(*command, "--no-advice", "--json").json["advice"] == []


def test_times_beyond_the_profiles_grid_are_noted(exegpt, tiny, tiny_profile):
    """The grid of the imagined profile ends at 1,024 tokens."""
    command = ("tune", "-m", tiny, "-p", tiny_profile, "-w", "20/20", "--policy", "static", "--no-advice", "--json")
    for bound, beyond in (("40ms", False), ("inf", True)):
        answer = exegpt(*command, "-l", bound).json
        assert bool(answer["estimate"]["extrapolated"]) == beyond
        assert any("beyond the profile's grid" in text for text in answer["assumptions"]) == beyond


@pytest.mark.parametrize(("replicas", "tp", "stages"), [(1, 1, 4), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)])
def test_an_engines_replicas_and_stages_can_be_simulated(exegpt, replicas, tp, stages):
    command = ("simulate", "-m", "opt-13b", "--max-num-seqs", 4, "--json")
    done = exegpt(*command, "--replicas", replicas, "--tp-degree", tp)
    assert done.code == 0, done.err
    assert len(done.json["utilisation"]) == 4 and replicas * tp * stages == 4
    single = exegpt(*command, "-c", f"{4 // replicas}xA40", "--tp-degree", tp).json
    assert done.json["throughput_seq_s"] == pytest.approx(replicas * single["throughput_seq_s"])


@pytest.mark.parametrize("policy", ["chunked", "orca"])
def test_as_many_blocks_as_memory_holds_are_not_too_many(exegpt, policy):
    command = ("simulate", "-m", "opt-13b", "-c", "1xA40", "-w", "S", "--max-num-seqs", 4, "--policy", policy)

    def notes(*more):
        return [text for text in exegpt(*command, *more, "--json").json["assumptions"] if "more than the" in text]

    assert notes() == []
    (note,) = notes("--kv-blocks", 10**6)
    room = int(note.split("more than the ")[1].split(" ")[0].replace(",", ""))
    assert notes("--kv-blocks", room) == [] and notes("--kv-blocks", room + 1)


def test_the_model_is_readable_by_transformers(tiny):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoModelForCausalLM.from_pretrained(tiny).config.num_hidden_layers == 2
    assert AutoTokenizer.from_pretrained(tiny).decode(AutoTokenizer.from_pretrained(tiny)("hi").input_ids) == "hi"


def test_explain_is_named_where_reasons_are_left_out(exegpt):
    command = ("tune", "-l", "inf", "-w", "20/10", "--policy", "static", "-m", "opt-125m", "-c", "16xA40")
    done = exegpt(*command)
    assert "--advice predicts" in done.out and "--explain" not in done.out
    assert "16xA40 is one node with equal links between all devices; write 2x8xA40 for nodes of eight" in done.err
    assert "--advice" not in exegpt(*command, "--no-advice").out
    assert "is one node" not in exegpt(*command[:-1], "2x8xA40").err
