"""`--order` of `simulate --replay` and `run`: what is followed, and what is refused."""

import json
import random

import pytest

from xcore.orders import ORDERS

ENGINE = ("simulate", "-m", "opt-13b", "-c", "1xA40", "--max-num-seqs", 4, "--json")


@pytest.fixture
def trace(tmp_path):
    """Forty requests at once, of all that orders ask for."""
    rng, path = random.Random(3), tmp_path / "t.csv"
    rows = [
        f"{rng.randint(20, 800)},{rng.randint(5, 200)},0,{i // 15},{i % 5},answer,{rng.randint(5, 99)}"
        for i in range(40)
    ]
    path.write_text("input,output,arrival,client,application,unit,deadline_s\n" + "\n".join(rows))
    return path


@pytest.fixture
def graphs(exegpt, tmp_path):
    """Five applications, each with its own sizes."""
    log, out = tmp_path / "calls.jsonl", tmp_path / "graphs.json"
    sizes = [(str(i), run, 10 + 40 * (4 - i) + 9 * (run % 4)) for i in range(5) for run in range(12)]
    calls = [
        {"application": name, "run": run, "unit": "answer", "input_tokens": 400, "output_tokens": tokens, "next": "end"}
        for name, run, tokens in sizes
    ]
    log.write_text("\n".join(map(json.dumps, calls)))
    assert exegpt("graphs", "learn", log, "--out", out).code == 0
    return out


@pytest.mark.parametrize("name", ORDERS)
def test_a_replay_follows_any_order(exegpt, trace, graphs, name):
    known = ("--graphs", graphs) if ORDERS[name].ranked else ()
    first_come = exegpt(*ENGINE, "--replay", trace).json
    done = exegpt(*ENGINE, "--replay", trace, "--order", name, *known).json
    assert done["requests"] == 40 and done["seconds"] > 0
    differs = done["latency"]["mean"] != pytest.approx(first_come["latency"]["mean"], rel=1e-9)
    assert differs == (name not in ("fcfs", "doubling-budget")), "whose budgets are alike until one is preempted"
    assert exegpt(*ENGINE, "--replay", trace, "--order", name, "--starvation-guard", *known).json["requests"] == 40


def test_the_oracle_is_faster_than_the_learned_and_that_than_first_come(exegpt, trace):
    orders = ("fcfs", "learned", "sjf")
    first_come, learned, oracle = (exegpt(*ENGINE, "--replay", trace, "--order", name).json for name in orders)
    means = [done["latency"]["mean"] for done in (first_come, learned, oracle)]
    assert means == sorted(means, reverse=True)
    assert "order: learned, with a simulated ranker whose Kendall's tau is 0.55" in learned["assumptions"]


def test_running_requests_give_way_in_a_replay(exegpt, tmp_path):
    """Long requests come first and fill all four places; short ones come while they run."""
    path = tmp_path / "late.csv"
    rows = [f"100,300,{i / 100}" for i in range(4)] + [f"100,20,{2 + i / 2}" for i in range(8)]
    path.write_text("input,output,arrival\n" + "\n".join(rows))
    means = {}
    for preempt in ("none", "recompute", "swap"):
        words = ("--order", "sjf", "--preempt", preempt)
        done = exegpt(*ENGINE, "--replay", path, *words).json
        assert (done["preemptions"] > 0) == (preempt != "none")
        means[preempt] = done["latency"]["mean"]
        text = exegpt(*ENGINE[:-1], "--replay", path, *words).out
        assert (f"\n{done['preemptions']} preemption" in text) == (preempt != "none")
    assert means["swap"] < means["none"] and means["recompute"] < means["none"]


def test_a_policy_that_lets_nothing_give_way_is_refused(exegpt, trace):
    words = ("--policy", "static", "--encode-batch", 4, "--preempt", "swap")
    done = exegpt("simulate", "-m", "opt-13b", "-c", "1xA40", "--replay", trace, *words)
    assert done.code == 2 and "Under policy static, running requests can't give way" in done.err


@pytest.mark.slow
def test_a_run_in_which_requests_give_way_gives_the_same_tokens(exegpt, tiny, tiny_profile, requests, tmp_path):
    common = ("run", "-m", tiny, "-r", requests, "-p", tiny_profile, "--policy", "orca", "--max-num-seqs", 3)
    tokens = []
    for words in ((), ("--kv-blocks", 9, "--admission", "grow", "--preempt", "swap", "--swap-blocks", 50)):
        out = tmp_path / f"{len(words)}.jsonl"
        done = exegpt(*common, *words, "-o", out, "--json")
        assert done.code == 0, done.err
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        tokens.append({row["id"]: row["output_ids"] for row in rows})
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--order", "lifo"), "--order 'lifo' is not known: use one of fcfs"),
        (("--order", "sjf", "--ranker-tau", 0.5), "--ranker-tau 0.5 is only for --order learned, but the order is sjf"),
        (("--order", "learned", "--ranker-tau", 1.5), "tau is 1.5, but it must be above 0"),
        (("--order", "gittins"), "--order gittins needs --graphs FILE: learn demand graphs with `exegpt graphs learn`"),
        (("--order", "edf", "--graphs", "g.json"), "--graphs g.json is only for --order gittins, demand-slack, but"),
        (("--order", "vtc"), "Order vtc needs client of each request, but request 0 has none"),
    ],
)
def test_what_a_replay_refuses(exegpt, tmp_path, words, sentence):
    path = tmp_path / "t.csv"
    path.write_text("input,output\n10,5\n20,7\n")
    done = exegpt(*ENGINE, "--replay", path, *words)
    assert done.code == 2 and sentence in done.err and done.err.count("\n") == 1
    done = exegpt(*ENGINE, "--order", "sjf")
    assert done.code == 2 and "need --replay or --rate" in done.err


def test_a_deadline_that_is_none_is_refused_with_its_place(exegpt, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("input,output,deadline_s\n10,5,1\n20,7,soon\n")
    done = exegpt(*ENGINE, "--replay", path, "--order", "edf")
    assert done.code == 2 and "column 'deadline_s': 'soon' is not a deadline" in done.err


@pytest.fixture
def requests(tmp_path):
    path = tmp_path / "r.jsonl"
    rows = [
        {"id": str(i), "prompt": "x" * (5 + i), "max_tokens": 2 + 5 * i % 17, "ignore_eos": True} for i in range(12)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.slow
def test_a_run_follows_an_order_and_gives_the_same_tokens(exegpt, tiny, tiny_profile, requests, tmp_path):
    common = ("run", "-m", tiny, "-r", requests, "-p", tiny_profile, "--policy", "orca", "--max-num-seqs", 1)
    tokens, ended = [], []
    for name in ("fcfs", "sjf"):
        out = tmp_path / f"{name}.jsonl"
        done = exegpt(*common, "--order", name, "-o", out, "--json")
        assert done.code == 0, done.err
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        tokens.append({row["id"]: row["output_ids"] for row in rows})
        ended.append([len(row["output_ids"]) for row in rows])
    assert tokens[0] == tokens[1]
    assert ended[1] == sorted(ended[1]) != ended[0]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--order", "srtf"), "--order srtf needs the length of each output before the run, but request 'a' may end"),
        (("--order", "learned"), "--order learned needs --ranker FILE"),
        (("--order", "learned", "--ranker", "no.npz"), "There is no ranker file 'no.npz'"),
        (("--order", "edf"), "--order edf needs deadline_s of each request, but request 'a' has none"),
        (("--starvation-guard", "--adapt"), "the default order: leave out --adapt, or --starvation-guard."),
        (("--order", "srtf", "--preempt", "swap", "--adapt"), "leave out --adapt, or --order and --preempt."),
        (("--order", "mlfq", "--preempt", "swap"), "--preempt swap needs an order that ranks running requests too"),
        (("--preempt", "often"), "--preempt"),
        (("--preempt", "recompute", "--swap-blocks", 9), "--swap-blocks 9 is only for --preempt swap: leave it out"),
    ],
)
def test_what_a_run_refuses(exegpt, tiny, tiny_profile, tmp_path, words, sentence):
    path = tmp_path / "r.jsonl"
    path.write_text('{"id": "a", "prompt": "abc", "max_tokens": 5}\n')
    done = exegpt("run", "-m", tiny, "-r", path, "-p", tiny_profile, "--policy", "orca", *words)
    assert done.code == 2 and sentence in done.err and "Traceback" not in done.err


def test_a_run_in_which_requests_may_give_way_says_how_often_they_did(exegpt, tiny, tiny_profile, tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text('{"id": "a", "prompt": "abc", "max_tokens": 5}\n')
    run = ("run", "-m", tiny, "-r", path, "-p", tiny_profile, "--policy", "orca")
    for words in ((), ("--preempt", "recompute")):
        done = exegpt(*run, *words)
        assert done.code == 0 and ("0 preemptions, 0 predicted" in done.out + done.err) == bool(words)


def test_requests_may_say_whose_they_are_and_when_they_are_due(exegpt, tiny, tiny_profile, tmp_path):
    rows = [
        {
            "id": str(i),
            "prompt": "abc",
            "max_tokens": 3,
            "client": "ab"[i > 2],
            "application": str(i % 2),
            "deadline_s": 90 - i,
        }
        for i in range(6)
    ]
    path, out = tmp_path / "r.jsonl", tmp_path / "o.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    common = ("run", "-m", tiny, "-r", path, "-p", tiny_profile, "--policy", "orca", "--max-num-seqs", 1, "-o", out)
    for name, want in (("edf", "543210"), ("fcfs-app", "024135"), ("round-robin", "031425"), ("vtc", "031425")):
        done = exegpt(*common, "--order", name)
        assert done.code == 0, done.err
        assert "".join(json.loads(line)["id"] for line in out.read_text().splitlines()) == want
        out.unlink()


def test_a_traces_columns_say_the_same(exegpt, tiny, tiny_profile, tmp_path):
    path, out = tmp_path / "t.csv", tmp_path / "o.jsonl"
    path.write_text("input,output,deadline_s\n5,4,9\n5,4,7\n5,4,8\n")
    common = ("run", "-m", tiny, "-r", path, "-p", tiny_profile, "--policy", "orca", "--max-num-seqs", 1, "-o", out)
    assert exegpt(*common, "--order", "least-slack").code == 0
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["1", "2", "0"]


def test_a_run_follows_the_demand_of_applications(exegpt, tiny, tiny_profile, graphs, tmp_path):
    """Application 4 is the smallest, 0 the greatest; of one application, the earlier run goes first."""
    rows = [
        {"id": f"{app}{run}", "prompt": "abc", "max_tokens": 3, "application": app, "run": run, "unit": "answer"}
        for app in "0312"
        for run in "ab"
    ]
    path, out = tmp_path / "r.jsonl", tmp_path / "o.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    common = ("run", "-m", tiny, "-r", path, "-p", tiny_profile, "--policy", "orca", "--max-num-seqs", 1, "-o", out)
    done = exegpt(*common, "--order", "gittins", "--graphs", graphs)
    assert done.code == 0, done.err
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == "3a 3b 2a 2b 1a 1b 0a 0b".split()
    out.unlink()
    path.write_text(json.dumps(rows[0] | {"unit": "ask"}))
    done = exegpt(*common, "--order", "demand-slack", "--graphs", graphs)
    assert done.code == 2 and "has no unit 'ask' of '0': it has answer." in done.err
    path.write_text(json.dumps({"id": "a", "prompt": "abc", "max_tokens": 3, "application": "0"}))
    done = exegpt(*common, "--order", "gittins", "--graphs", graphs)
    assert done.code == 2 and "--order gittins needs unit of each request, but request 'a' has none" in done.err


@pytest.mark.parametrize(
    "wrong", [{"client": 5}, {"application": ""}, {"run": 7}, {"deadline_s": -1}, {"deadline_s": "soon"}]
)
def test_labels_that_are_none_are_refused(exegpt, tiny, tiny_profile, tmp_path, wrong):
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({"id": "a", "prompt": "abc", "max_tokens": 3} | wrong))
    done = exegpt("run", "-m", tiny, "-r", path, "-p", tiny_profile)
    assert done.code == 2 and f"Request 'a' has {next(iter(wrong))} = " in done.err


def test_orders_are_listed_with_what_they_need(exegpt):
    rows = {row["order"]: row for row in exegpt("list", "orders", "--json").json["orders"]}
    assert set(rows) == set(ORDERS) and rows["edf"]["needs"] == "deadline_s" and rows["sjf"]["oracle"] == "yes"
    assert "the client served least (VTC)" in exegpt("list", "orders").out


def test_a_replay_of_runs_reports_their_completion(exegpt, graphs, tmp_path):
    """A run's second request arrives after its first has ended: alone on the engine, the run takes their sum."""
    path = tmp_path / "t.csv"
    head = "input,output,arrival_s,application,run,unit,after_s\n"
    path.write_text(f"{head}400,50,0,0,x,answer,\n400,20,0,0,x,answer,2.5\n")
    out = tmp_path / "times.jsonl"
    done = exegpt(*ENGINE, "--replay", path, "--out", out)
    assert done.code == 0, done.err
    first, second = map(json.loads, out.read_text().splitlines())
    assert second["arrival_s"] == pytest.approx(first["finish_s"] + 2.5)
    assert done.json["runs"] == {"count": 1, "completion": dict.fromkeys(done.json["latency"], second["finish_s"])}
    crowd = "".join(f"400,{90 - 20 * (i % 5)},0,{i % 5},{i},answer,\n" for i in range(30))
    path.write_text(f"{head}{crowd}")
    means = [
        exegpt(*ENGINE, "--replay", path, "--order", *order).json["runs"]["completion"]["mean"]
        for order in (("fcfs",), ("gittins", "--graphs", graphs))
    ]
    assert means[1] < 0.9 * means[0], "applications of long outputs have low numbers here, and those of short ones high"
    done = exegpt(*ENGINE, "--replay", path, "--timeline", tmp_path / "t.json")
    assert done.code == 0, "no request follows another"
    path.write_text(f"{head}400,50,0,0,x,answer,1\n")
    assert exegpt(*ENGINE, "--replay", path, "--timeline", tmp_path / "t.json").code == 0, "there is none before it"
    path.write_text("input,output,after_s\n5,5,1\n")
    done = exegpt(*ENGINE, "--replay", path)
    assert done.code == 2 and "has after_s = 1, but no run" in done.err
