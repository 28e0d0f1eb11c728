"""Requests and applications on a plan's engines: tokens, what is lost when something ends, and what is refused."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.exegpt.cli.conftest import run_command
from tests.xserver.conftest import schedule_for
from tests.xserver.http.test_completions import expected
from xcore import document
from xcore.errors import InputError
from xcore.requests.request import Request
from xcore.specs.cluster_plan import Plan, PlannedModel, Share
from xcore.specs.request_times import summarise
from xmulti.applications.planned_application import plan_application
from xmulti.plans import plan_run
from xmulti.plans.plan_requests import read_plan_requests
from xmulti.plans.plan_run import PlannedCalls, PlanRunOptions, run_plan
from xmulti.serving.replica_links import replica_links
from xrunner.core.results import read_results
from xrunner.models.create import create_model

APPLICATION = """
nodes:
  - {name: chain, model: tiny, workload: 12/6, requests: 4, rounds: [3, 1, 2, 1], longest_output: 6}
  - {name: wide, model: wide, workload: 5/9, times: 2}
  - {name: deep, model: deep, workload: 7/4, requests: 4}
edges:
  - {source: chain, target: chain}
  - {source: chain, target: wide, kind: final}
  - {source: chain, target: deep}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With models of different shapes, and a plan: one has a device of its own, two share another."""
    made = tmp_path_factory.mktemp("plan")
    sizes = {"heads": 2, "kv_heads": 2, "context": 160}
    create_model(made / "tiny", "llama", layers=2, hidden=32, ffn=64, vocab=300, seed=0, **sizes)
    create_model(made / "wide", "qwen2", layers=1, hidden=64, ffn=96, vocab=300, seed=1, **sizes)
    create_model(made / "deep", "opt", layers=4, hidden=32, ffn=48, vocab=300, seed=2, **sizes)
    models = []
    for name in ("tiny", "wide", "deep"):
        made_for, alone = replace(schedule_for(made / name), admission="grow", kv_blocks=24), name == "tiny"
        share = None if alone else Share("time", pool="merged")
        unknown = summarise((), 0.0)
        place = (0,) if alone else (1,)
        models.append(PlannedModel(name, place, made_for, unknown, share=share, directory=str(made / name)))
    cluster = replace(models[0].schedule.cluster, devices_per_node=2)
    document.write(made / "plan.json", Plan(Plan.VERSION, "exegpt", cluster, tuple(models)))
    (made / "application.yaml").write_text(APPLICATION)
    return made


def read_plan(folder):
    return document.read(Plan, folder / "plan.json")


def run(folder, *options):
    return run_command("run", "--plan", folder / "plan.json", *options, "--threads", 1)


def requests_of(count, output=20):
    """Some for each model, in turns."""
    names = ("tiny", "wide", "deep")
    return [
        {
            "id": f"r{i}",
            "model": names[i % 3],
            "prompt_ids": [(7 * i + j) % 290 for j in range(3 + i % 9)],
            "max_tokens": output + i % 5,
            "ignore_eos": True,
        }
        for i in range(count)
    ]


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tokens_of(path):
    results = read_results(path)
    assert len({r.id for r in results}) == len(results)
    return {result.id: list(result.output_ids) for result in results}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_models_share_two_devices(folder, tmp_path):
    """Each layer of both on both: a rank for each device, started under mpirun."""
    pytest.importorskip("mpi4py")
    plan = read_plan(folder)
    models = []
    for model in plan.models[1:]:
        stages = (replace(model.schedule.stages[0], devices=(0, 1), tp=2),)
        schedule = replace(model.schedule, stages=stages, cluster=plan.cluster)
        models.append(replace(model, devices=(0, 1), schedule=schedule))
    document.write(tmp_path / "plan.json", replace(plan, models=tuple(models)))
    rows = [row for row in requests_of(24) if row["model"] != "tiny"]
    done = run(tmp_path, "--requests", written(tmp_path / "r.jsonl", rows), "--out", tmp_path / "out.jsonl", "--json")
    assert done.code == 0, done.err
    want = {row["id"]: expected(folder / row["model"], row["prompt_ids"], row["max_tokens"]) for row in rows}
    assert tokens_of(tmp_path / "out.jsonl") == want


@pytest.mark.slow
def test_requests_reach_the_models_that_they_name(folder, tmp_path):
    rows = requests_of(15)
    rows[3] |= {"temperature": 0.8}  # its seed is a hash of its id, wherever it runs
    rows[9] |= {"arrival_s": 0.3}
    done = run(folder, "--requests", written(tmp_path / "r.jsonl", rows), "--out", tmp_path / "out.jsonl", "--json")
    assert done.code == 0, done.err
    found = tokens_of(tmp_path / "out.jsonl")
    want = {row["id"]: expected(folder / row["model"], row["prompt_ids"], row["max_tokens"]) for row in rows}
    sampled = want.pop("r3")
    assert found.pop("r3") != sampled
    assert found == want
    shown = {model["name"]: model for model in done.json["models"]}
    assert {name: shown[name]["measured"]["requests"] for name in shown} == {"tiny": 5, "wide": 5, "deep": 5}
    assert all(model["predicted"]["requests"] == 5 for model in shown.values())
    assert done.json["seconds"] > 0.3 and done.json["predicted_seconds"] > 0.3 and done.json["resumed"] == 0
    results = {r.id: r for r in read_results(tmp_path / "out.jsonl")}
    assert results["r9"].arrival_s >= 0.3 > results["r0"].arrival_s


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_replicas_on_two_engines_give_the_tokens_of_one(folder, tmp_path, monkeypatch):
    """One has a device of its own, the other shares a device."""
    plan = read_plan(folder)
    tiny, wide = plan.models[:2]
    models = (tiny, replace(tiny, devices=wide.devices, share=wide.share), wide)
    document.write(tmp_path / "plan.json", replace(plan, models=models))
    once = [row for row in requests_of(15) if row["model"] != "deep"]
    rows = once + [row | {"id": f"again-{row['id']}"} for row in once]
    file, sent = written(tmp_path / "r.jsonl", rows), []

    def watched(units, links):
        for place, link in links.items():
            monkeypatch.setattr(link, "add", lambda request, p=place, add=link.add: sent.append(p) or add(request))
        return replica_links(units, links)

    monkeypatch.setattr(plan_run, "replica_links", watched)
    asked = PlanRunOptions(
        *(tmp_path / "plan.json", {}, str(file), None, tmp_path / "out.jsonl", False, 0, None, None, 1)
    )
    result = run_plan(asked)
    want = {row["id"]: expected(folder / row["model"], row["prompt_ids"], row["max_tokens"]) for row in rows}
    assert tokens_of(tmp_path / "out.jsonl") == want
    assert [sent.count(place) for place in range(3)] == [5, 5, 10], "in turns: nothing ends before all have arrived"
    ran = [(model.name, len(model.measured), len(model.predicted)) for model in result.models]
    assert ran == [("tiny", 10, 10), ("wide", 10, 10)]


@pytest.mark.slow
def test_each_call_reads_what_the_models_before_it_wrote(folder, tmp_path):
    done = run(folder, "--application", folder / "application.yaml", "--out", tmp_path / "out.jsonl", "--seed", 5)
    assert done.code == 0, done.err
    assert "; predicted: " in done.out and done.out.count("predicted") == 4
    results = {result.id: result for result in read_results(tmp_path / "out.jsonl")}
    application = plan_application(folder / "application.yaml", read_plan(folder), 5)
    assert len(results) == PlannedCalls(application, False, read_plan(folder)).total == 7 + 8 + 4
    calls = application.calls()
    left = calls.begin()
    while left:
        chain = left.pop()
        prompt, result = calls.prompt(chain), results[chain.name]
        want = expected(application.models[chain.node.name].directory, list(prompt), len(result.output_ids))
        assert list(result.output_ids) == want and result.prompt_tokens == len(prompt)
        assert application.request(chain, prompt) == Request(chain.name, prompt, len(want), ignore_eos=True)
        left += calls.end(chain, result.output_ids)
    ends = {name: result.finish_s for name, result in results.items()}
    assert results["wide/5/0"].arrival_s >= ends["chain/2/1"] and results["chain/0/2"].arrival_s >= ends["chain/0/1"]
    assert results["wide/2/0"].arrival_s < max(ends["chain/0/2"], ends["chain/2/1"]), "it waits for its own call alone"


def test_texts_pass_between_models(folder, tmp_path):
    """Of prompts that are in a file, with rounds; tokenizers that differ read each other's texts."""
    lines = [{"prompts": ["one two", "three"]}, {"prompt": "four"}, {"prompt_ids": [5, 6, 7]}]
    written(tmp_path / "prompts.jsonl", lines)
    nodes = [
        {"name": "tiny", "model": "m", "workload": "8/8", "prompts": "prompts.jsonl", "longest_output": 8},
        {"name": "deep", "model": "m", "workload": "8/8", "instructions": "in short", "longest_output": 5},
    ]
    edges = [{"source": "tiny", "target": "tiny"}, {"source": "tiny", "target": "deep"}]
    (tmp_path / "app.yaml").write_text(json.dumps({"nodes": nodes, "edges": edges}))
    plan = read_plan(folder)
    application = plan_application(tmp_path / "app.yaml", plan, 0)
    calls = application.calls()
    tiny = calls.begin()
    tokenizer = Tokenizer.from_file(str(folder / "tiny" / "tokenizer.json"))
    assert [tokenizer.decode(list(calls.prompt(chain))) for chain in tiny] == [
        "one two",
        "four",
        tokenizer.decode([5, 6, 7]),
    ]
    assert [len(chain.own) for chain in tiny] == [2, 1, 1]
    first = application.request(tiny[0], calls.prompt(tiny[0]))
    assert first.max_tokens == 8 and not first.ignore_eos
    # the other model's tokenizer has other ids for the same text
    other = tmp_path / "deep"
    other.mkdir()
    for file in (folder / "deep").iterdir():
        (other / file.name).symlink_to(file)
    shifted = json.loads((folder / "deep" / "tokenizer.json").read_text())
    vocab = shifted["model"]["vocab"]
    words = sorted(vocab, key=vocab.get)
    shifted["model"]["vocab"] = {word: vocab[words[i - 1]] for i, word in enumerate(words)}
    (other / "tokenizer.json").unlink()
    (other / "tokenizer.json").write_text(json.dumps(shifted))
    moved = replace(plan, models=(*plan.models[:2], replace(plan.models[2], directory=str(other))))
    reading = plan_application(tmp_path / "app.yaml", moved, 0)
    calls = reading.calls()
    chain = calls.begin()[1]
    output = tuple(tokenizer.encode("hello there").ids)
    (deep,) = calls.end(chain, output)
    theirs = Tokenizer.from_file(str(other / "tokenizer.json"))
    assert theirs.decode(list(calls.prompt(deep))) == "in shorthello there"
    assert calls.prompt(deep)[-len(output) :] != output


def start(folder, *options):
    command = [sys.executable, "-m", "exegpt", "run", "--plan", str(folder / "plan.json"), *map(str, options)]
    return subprocess.Popen([*command, "--threads", "1"], stderr=subprocess.PIPE, text=True)


def until_some(path, process):
    """Wait until some results are there."""
    until = time.monotonic() + 60
    while not path.is_file() or path.read_bytes().count(b"\n") < 4:
        assert process.poll() is None and time.monotonic() < until, process.stderr and process.stderr.read()
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_an_engine_that_ends_is_replaced(folder, tmp_path):
    """And its requests go on where they were."""
    rows = requests_of(120, 100)
    out = tmp_path / "out.jsonl"
    process = start(folder, "--requests", written(tmp_path / "r.jsonl", rows), "--out", out)
    until_some(tmp_path / "out.jsonl.partial", process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    engines = [int(child) for child in children if b"engine" in Path(f"/proc/{child}/cmdline").read_bytes()]
    assert len(engines) == 2
    for engine in engines:
        os.kill(engine, signal.SIGKILL)
    _, errors = process.communicate(timeout=150)
    assert process.returncode == 0, errors
    assert errors.count("is restarted") == 2
    assert {name: len(tokens) for name, tokens in tokens_of(out).items()} == {r["id"]: r["max_tokens"] for r in rows}


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"])
def test_a_run_that_was_interrupted_goes_on(folder, tmp_path, number, code):
    application, out = tmp_path / "long.yaml", tmp_path / "out.jsonl"
    application.write_text(
        APPLICATION.replace("requests: 4", "requests: 40").replace("[3, 1, 2, 1]", "3").replace("6}", "30}", 1)
    )
    process = start(folder, "--application", application, "--out", out)
    until_some(tmp_path / "out.jsonl.partial", process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code and "Traceback" not in errors, errors
    left = (tmp_path / "out.jsonl.partial").read_bytes().count(b"\n")
    done = run(folder, "--application", application, "--out", out, "--resume", "--json")
    assert done.code == 0, done.err
    assert done.json["resumed"] == left and done.json["predicted_seconds"] is None
    calls = plan_application(application, read_plan(folder), 0).calls()
    found, waiting = tokens_of(out), calls.begin()
    while waiting:
        chain = waiting.pop()
        waiting += calls.end(chain, tuple(found.pop(chain.name)))
    assert calls.left == 0 and not found


def test_a_trace_names_the_models(folder, tmp_path):
    with (tmp_path / "trace.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("model", "input", "output"), ("wide", 9, 4), ("tiny", 5, 7), ("wide", 3, 2)])
    found = read_plan_requests(str(tmp_path / "trace.csv"), read_plan(folder), 0)
    lengths = {
        name: [(r.id, len(r.prompt_ids), r.max_tokens, r.ignore_eos) for r in own] for name, own in found.items()
    }
    assert lengths == {"wide": [("wide/0", 9, 4, True), ("wide/1", 3, 2, True)], "tiny": [("tiny/0", 5, 7, True)]}
    again = read_plan_requests(str(tmp_path / "trace.csv"), read_plan(folder), 0)
    assert again == found != read_plan_requests(str(tmp_path / "trace.csv"), read_plan(folder), 1)
    (tmp_path / "trace.csv").write_text("model,input,output\ntiny,9,4\nwide,999,4\n")
    with pytest.raises(
        InputError, match=r"None of the 1 rows of wide fits the context of 'wide' \(160"
    ):  # before any engine
        read_plan_requests(str(tmp_path / "trace.csv"), read_plan(folder), 0)
    (tmp_path / "trace.csv").write_text("model,input,output\ntiny,9,4\nwide,9,4\nwide,999,4\n")
    found = read_plan_requests(str(tmp_path / "trace.csv"), read_plan(folder), 0)
    assert {name: len(own) for name, own in found.items()} == {"wide": 1, "tiny": 1}  # a longer row is left out


REFUSED = {
    "neither": ([], "pass one of --requests and --application"),
    "schedule": (["--schedule", "s.json"], "--schedule cannot be combined with --plan"),
    "policy": (["--policy", "orca"], "--policy cannot be combined with --plan"),
    "resume": (["--requests", "r.jsonl", "--resume"], "--resume needs --out"),
    "directory": (["--requests", "r.jsonl", "--model", "elsewhere"], "pass --model NAME=DIR"),
    "in turn": (["--requests", "r.jsonl", "--in-turn"], "--in-turn is only for the calls of an application"),
    "model": (["--requests", "unknown.jsonl"], "line 1 is for model 'huge': write one of tiny, wide, deep"),
    "no model": (["--requests", "no-model.jsonl"], "line 1 names no model: write one of tiny, wide, deep as model."),
    "models": (["--requests", "models.jsonl"], "line 1 is for model ['tiny']: write one of tiny, wide, deep"),
    "twice": (["--requests", "twice.jsonl"], "Request 'r0' (line 2) has the same id as an earlier"),
    "node": (["--application", "other.yaml"], "Node 'n' of"),
    "two models": (
        ["--application", "two.yaml"],
        "Node 'tiny' has the name of one model, but names another model",
    ),
    "load": (["--application", "load.yaml"], "nodes.0.load is 5, which has no unit: write 5s"),
    "endless load": (["--application", "endless.yaml"], "Node 'tiny' has a load of inf: write the loading time"),
    "prompts": (["--application", "no-prompts.yaml"], "There is no file"),
    "long": (["--application", "long.yaml"], "Call tiny/0/0 has a prompt of 200 tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_run_of_a_plan_refuses(folder, tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    row = requests_of(1)[0]
    written(tmp_path / "r.jsonl", [row])
    written(tmp_path / "unknown.jsonl", [row | {"model": "huge"}])
    written(tmp_path / "no-model.jsonl", [{key: value for key, value in row.items() if key != "model"}])
    written(tmp_path / "models.jsonl", [row | {"model": ["tiny"]}])
    written(tmp_path / "twice.jsonl", [row, row | {"model": "deep"}])
    (tmp_path / "other.yaml").write_text("nodes: [{name: n, model: huge, workload: 3/3, requests: 1}]")
    (tmp_path / "no-prompts.yaml").write_text("nodes: [{name: tiny, model: t, workload: 3/3, prompts: gone.jsonl}]")
    (tmp_path / "long.yaml").write_text("nodes: [{name: tiny, model: t, workload: 200/3, requests: 1}]")
    (tmp_path / "two.yaml").write_text("nodes: [{name: tiny, model: deep, workload: 3/3, requests: 1}]")
    for name, load in (("load", "5"), ("endless", "inf")):
        node = f"{{name: tiny, model: t, workload: 3/3, requests: 1, load: {load}}}"
        (tmp_path / f"{name}.yaml").write_text(f"nodes: [{node}]")
    options, words = REFUSED[case]
    done = run(folder, *options)
    assert done.code == 2 and words in done.err and done.err.count("\n") < 8, done.err
    assert "Traceback" not in done.err


def test_without_a_plan_an_application_has_no_models(folder):
    done = run_command("run", "--model", folder / "tiny", "--application", folder / "application.yaml")
    assert done.code == 2 and "pass --plan" in done.err
    done = run_command("run", "--model", folder / "tiny")
    assert done.code == 2 and "pass --requests" in done.err


@pytest.mark.slow
def test_a_prediction_is_made_at_the_speed_that_the_engines_report(folder, monkeypatch):
    """Alone on a device and sharing one; the profile may be of a slower or faster moment."""
    profiles = {}

    def predict(self, results, profile_of):
        profiles.update({model.name: profile_of(model) for model in self.plan.models})
        return {}

    monkeypatch.setattr(PlannedCalls, "predict", predict)
    files = {"plan": folder / "plan.json", "application": folder / "application.yaml"}
    rest = dict.fromkeys(("requests", "out", "device", "attention"))
    run_plan(PlanRunOptions(**files, **rest, directories={}, resume=False, seed=0, threads=1))
    assert set(profiles) == {"tiny", "wide", "deep"}
    for name, profile in profiles.items():
        assert "for compute, " in profile.provenance["scaled"], name
