"""Applications in stages: what is stopped goes on, what is lost is replaced, and what can't be run is refused."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from exegpt.cli import run_stages
from tests.exegpt.cli.conftest import run_command
from tests.mpi import MPIRUN
from tests.xserver.http.test_completions import expected
from xcore import document
from xcore.requests.request import Result
from xcore.specs.request_times import RequestTimes
from xmulti.applications.application_calls import ApplicationCalls
from xmulti.applications.planned_application import application_on
from xmulti.files.application_file import read_application
from xmulti.files.stage_plan import ExecutionStage, StagedNode, StagePlan
from xmulti.files.stage_plan_file import planned_node
from xmulti.plans.engine_client import EngineClient
from xmulti.plans.plan_run import PlannedModelRun
from xmulti.stages.stage_planning import propose_stages
from xmulti.stages.stage_run import Loading, StageRun
from xrunner.core.results import read_results
from xrunner.models.create import create_model

NODES = """
linked: 1  # no plan splits layers, whatever this machine's times are
nodes:
  - {name: chain, model: CHAIN, workload: 12/6, requests: 4, rounds: [3, 1, 2, 1], longest_output: 6, load: 3s}
  - {name: deep, model: DEEP, workload: 7/110, requests: 6, load: 3s}
  - {name: wide, model: WIDE, workload: 5/9, times: 2, load: 3s}
edges:
  - {source: chain, target: chain}
  - {source: chain, target: wide, kind: final}
"""
WITH_RANKS = pytest.mark.skipif(not MPIRUN, reason="there is no mpirun: pip install -e '.[mpi]'")
ENOUGH = 20
"""Tokens of the model that is stopped, before it is."""


def written_stages(*stages):
    """Stages of a plan, by hand: of each node its replicas and devices."""
    return tuple(
        ExecutionStage(
            float(at),
            at + 1.0,
            tuple(StagedNode(name, dp, len(devices) // dp, devices) for name, (dp, devices) in stage.items()),
        )
        for at, stage in enumerate(stages)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With models of different shapes, an application of them, and its plan on two devices: `deep` is stopped for
    `wide`, which has both, and goes on.
    """
    made = tmp_path_factory.mktemp("stages")
    sizes = {"heads": 2, "kv_heads": 2, "context": 160}
    create_model(made / "CHAIN", "llama", layers=2, hidden=32, ffn=64, vocab=300, seed=0, **sizes)
    create_model(made / "WIDE", "qwen2", layers=1, hidden=64, ffn=96, vocab=300, seed=1, **sizes)
    create_model(made / "DEEP", "opt", layers=4, hidden=32, ffn=48, vocab=300, seed=2, **sizes)
    text = NODES
    for name in ("CHAIN", "WIDE", "DEEP"):
        text = text.replace(name, str(made / name))
    (made / "application.yaml").write_text(text)
    cluster = run_command("show", "local", "--yaml").out
    (made / "two.yaml").write_text(cluster.replace("devices_per_node: 1", "devices_per_node: 2"))
    asked = read_application(made / "application.yaml", str(made / "two.yaml"))
    plan = propose_stages(asked)[0].plan
    assert {model.name for model in plan.models} == {"chain", "deep", "wide"}
    stages = written_stages({"chain": (1, (1,)), "deep": (1, (0,))}, {"wide": (2, (0, 1))}, {"deep": (1, (0,))})
    # a cache for little more than one sequence: it has much to do when it is stopped
    models = tuple(
        replace(model, schedules=tuple(replace(s, kv_blocks=10) for s in model.schedules))
        if model.name == "deep"
        else model
        for model in plan.models
    )
    document.write(made / "stages.json", replace(plan, stages=stages, models=models))
    return made


def application_of(folder, seed):
    plan = document.read(StagePlan, folder / "stages.json")
    nodes = {node.name: node for stage in plan.stages for node in stage.nodes}
    return application_on(
        folder / "application.yaml", {name: planned_node(plan, node) for name, node in nodes.items()}, seed
    )


def check_results(application, results):
    """Every call has transformers' tokens, and read what those before it wrote."""
    assert len(results) == ApplicationCalls(application, False).total
    calls = application.calls()
    left = calls.begin()
    while left:
        call = left.pop()
        prompt, result = calls.prompt(call), results[call.name]
        want = expected(application.models[call.node.name].directory, list(prompt), len(result.output_ids))
        assert list(result.output_ids) == want and result.prompt_tokens == len(prompt)
        assert application.request(call, prompt).max_tokens == len(want)
        left += calls.end(call, result.output_ids)


def engine_of(directory):
    """The process of the engine that runs this model."""
    me = os.getpid()
    for child in Path(f"/proc/{me}/task/{me}/children").read_text().split():
        words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        if b"engine" in words and str(directory).encode() in words:
            return int(child)
    raise AssertionError("no such engine")


@WITH_RANKS
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_what_is_stopped_goes_on_and_what_is_lost_is_replaced(folder, tmp_path, monkeypatch):
    """`chain` isn't asked before `deep` has made some tokens, lost its engine, and made some more: the next stage's
    turn comes, which stops it, in the midst of its calls.
    """
    ask, lost = EngineClient.ask, []

    async def gated(self, model, request):
        async def until_made(count):
            while sum(len(output.tokens) for output in deep.outputs.values()) < count:
                await asyncio.sleep(0.002)

        if model == "chain":
            deep = self._links["deep"]
            await until_made(ENOUGH)
            if not lost:
                lost.append(engine_of(folder / "DEEP"))
                os.kill(lost[0], signal.SIGKILL)
            await until_made(2 * ENOUGH)
        return await ask(self, model, request)

    monkeypatch.setattr(EngineClient, "ask", gated)
    options = ("--application", folder / "application.yaml", "--out", tmp_path / "out.jsonl", "--seed", 5)
    done = run_command("run", "--plan", folder / "stages.json", *options, "--threads", 1, "--json")
    assert done.code == 0, done.err
    assert done.err.count("is restarted") == 1
    found = read_results(tmp_path / "out.jsonl")
    results = {result.id: result for result in found}
    assert len(found) == len(results) == 7 + 6 + 8
    check_results(application_of(folder, 5), results)
    first, second, third = done.json["stages"]
    names = [{node["name"]: node["dp"] for node in stage["nodes"]} for stage in (first, second, third)]
    assert names == [{"chain": 1, "deep": 1}, {"wide": 2}, {"deep": 1}]
    assert {model["name"]: model["stopped"] for model in done.json["models"]} == {"chain": 0, "deep": 1, "wide": 0}
    deep = [result for name, result in results.items() if name.startswith("deep")]
    assert any(r.first_token_s < first["end_s"] and r.finish_s > third["start_s"] for r in deep), (
        "one in its midst went on"
    )
    assert not any(first["end_s"] + 1 < r.finish_s < third["start_s"] for r in deep), "none ran beside both devices'"
    assert all(first["end_s"] <= r.finish_s <= third["start_s"] for n, r in results.items() if n.startswith("wide"))
    assert all(r.arrival_s <= r.start_s <= r.first_token_s <= r.finish_s for r in found), "begun once, wherever"
    loaded = [(loading["name"], loading["tp"]) for loading in done.json["loadings"]]
    assert loaded == [("chain", 1), ("deep", 1), ("wide", 1), ("deep", 1)], "the lost one's replacement isn't one"
    predicted = {model["name"]: model["predicted"]["seconds"] for model in done.json["models"]}
    assert 3 < predicted["chain"] < predicted["wide"] < predicted["deep"] == done.json["predicted_seconds"]
    assert [{n["name"] for n in stage["nodes"]} for stage in done.json["predicted_stages"]][-2:] == [{"wide"}, {"deep"}]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_models_file_is_planned_and_run(folder, tmp_path):
    models = [
        {"name": name, "model": str(folder / name), "workload": "9/5", "requests": 3} for name in ("CHAIN", "DEEP")
    ]
    file, plan = tmp_path / "models.yaml", tmp_path / "stages.json"
    file.write_text(json.dumps({"models": models}))
    done = run_command("plan", file, "--cluster", folder / "two.yaml", "--method", "samullm", "--out", plan)
    assert done.code == 0, done.err
    out = tmp_path / "out.jsonl"
    done = run_command("run", "--plan", plan, "--application", file, "--out", out, "--threads", 1)
    assert done.code == 0, done.err
    assert "6 calls in" in done.out and "predicted for these outputs: " in done.out and "planned: " in done.out
    lengths = {result.id: (result.prompt_tokens, len(result.output_ids)) for result in read_results(out)}
    assert lengths == {f"{name}/{i}/0": (9, 5) for name in ("CHAIN", "DEEP") for i in range(3)}


def test_nodes_that_were_done_before(folder):
    """What a resumed run need not load: nodes all of whose calls have results."""
    application = application_of(folder, 0)
    calls, results = application.calls(), {}
    waiting, ended = calls.begin(), []
    of_file = ApplicationCalls(application, False)
    while waiting:
        chain = waiting.pop(0)
        assert of_file.ended(results) == [name for name, left in calls.left_of.items() if not left]
        output = (1,) * application.output_tokens(chain, len(calls.prompt(chain)))
        results[chain.name] = Result(chain.name, 1, output, "length", 0.0, 0.0, 0.0, 0.0)
        waiting += calls.end(chain, output)
        ended.append(len(of_file.ended(results)))
    assert ended[-1] == 3 and set(ended) == {0, 1, 2, 3}


@WITH_RANKS
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_in_stages_that_was_interrupted_goes_on(folder, tmp_path):
    application, out = tmp_path / "long.yaml", tmp_path / "out.jsonl"
    application.write_text((folder / "application.yaml").read_text().replace("requests: 6", "requests: 12"))
    options = ["run", "--plan", folder / "stages.json", "--application", application, "--out", out, "--threads", 1]
    process = subprocess.Popen([sys.executable, "-m", "exegpt", *map(str, options)], stderr=subprocess.PIPE, text=True)
    partial, until = tmp_path / "out.jsonl.partial", time.monotonic() + 60
    while not partial.is_file() or partial.read_bytes().count(b"\n") < 7:  # the chain, but for what came of the other
        assert process.poll() is None and time.monotonic() < until, process.stderr and process.stderr.read()
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors, errors
    left = partial.read_bytes().count(b"\n")
    done = run_command(*options, "--resume", "--json")
    assert done.code == 0, done.err
    assert done.json["resumed"] == left and done.json["predicted_seconds"] is None
    found = read_results(out)
    assert len({result.id for result in found}) == len(found) == 7 + 12 + 8


def test_what_is_printed_of_a_resumed_run(folder, capsys):
    """Some nodes had ended before; the others' stages are shown, and nothing is predicted for them alone."""
    plan = document.read(StagePlan, folder / "stages.json")
    stages = written_stages({"deep": (1, (0,))}, {"wide": (2, (0, 1))}, {"deep": (1, (1,))})
    served = (RequestTimes(0, 7, 110, 0.0, 0.5, 1.0, 2.5),)
    loadings = (Loading("deep", 1, 0.0, 0.25), Loading("deep", 1, 2.0, 2.125))
    result = StageRun(plan, (PlannedModelRun("deep", served, ()),), 7, stages, loadings, None)
    assert (result.stops("deep"), result.stops("wide"), result.stops("chain")) == (1, 0, 0)
    run_stages._print(result)
    printed = capsys.readouterr()
    assert "1 call in 2.5 s; planned: 3 s." in printed.out and "250 ms + 125 ms" in printed.out
    assert "7 calls finished before this run" in printed.err
    run_stages._print(replace(result, models=(), stages=()))
    assert "0 calls in 0 ms" in capsys.readouterr().out


def plan_with(folder, path, **changes):
    document.write(path, replace(document.read(StagePlan, folder / "stages.json"), **changes))
    return path


REFUSED = {
    "requests": (["--requests", "r.jsonl"], "'stages.json' is a plan of stages for the calls of an application"),
    "neither": ([], "pass --application instead"),
    "in turn": (["--application", "application.yaml", "--in-turn"], "--in-turn is not for plans of stages"),
    "directory": (["--application", "application.yaml", "--model", "x=DEEP"], "--model x=… names no model of"),
    "other weights": (["--application", "application.yaml", "--model", "chain=DEEP"], "pass --model chain=DIR"),
    "fewer nodes": (["--application", "fewer.yaml"], "have the nodes chain, deep, wide, but 'fewer.yaml' has chain"),
    "other nodes": (["--application", "other.yaml"], "Node 'n' of 'other.yaml' names no model of the plan"),
    "other edges": (
        ["--application", "edges.yaml"],
        "reads the output of 'wide', but the plan's stages run 'wide' later",
    ),
    "no weights": (["--application", "application.yaml"], "does not name the directory of model 'chain'"),
    "no engines": (["--application", "application.yaml"], "does not say how to start the engines of its stages"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_run_in_stages_refuses(folder, tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    plan = document.read(StagePlan, folder / "stages.json")
    changes = {
        "no weights": {"models": tuple(replace(model, directory=None) for model in plan.models)},
        "no engines": {"models": (), "cluster": None},
    }
    plan_with(folder, Path("stages.json"), **changes.get(case, {}))
    text = (folder / "application.yaml").read_text()
    Path("application.yaml").write_text(text)
    Path("edges.yaml").write_text(text + "  - {source: wide, target: deep}\n")
    Path("fewer.yaml").write_text("nodes: [{name: chain, model: m, workload: 3/3, requests: 1}]")
    Path("other.yaml").write_text("nodes: [{name: n, model: m, workload: 3/3, requests: 1}]")
    for name in ("CHAIN", "DEEP", "WIDE"):
        Path(name).symlink_to(folder / name)
    options, words = REFUSED[case]
    done = run_command("run", "--plan", "stages.json", *options)
    assert done.code == 2 and words in done.err and done.err.count("\n") < 8, done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("command", ["serve", "simulate"])
def test_other_commands_take_no_stages(folder, command):
    done = run_command(command, "--plan", folder / "stages.json")
    assert done.code == 2 and "is a plan of stages, which only `exegpt run --plan" in done.err


def in_both_degrees(model):
    """A model of a plan of stages, on two devices too."""
    (one,) = model.schedules
    (stage,), (costs,) = one.stages, model.costs.degrees
    two = replace(one, stages=(replace(stage, devices=(0, 1), tp=2),))
    return replace(model, schedules=(one, two), costs=replace(model.costs, degrees=(costs, replace(costs, tp=2))))


@WITH_RANKS
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_nodes_layers_are_split_over_two_devices(folder, tmp_path):
    """By an engine of two ranks, which gives its devices to two engines of one."""
    plan = document.read(StagePlan, folder / "stages.json")
    stages = written_stages({"chain": (1, (0, 1))}, {"wide": (1, (1,)), "deep": (1, (0,))})
    models = tuple(in_both_degrees(model) for model in plan.models)
    document.write(tmp_path / "stages.json", replace(plan, stages=stages, models=models))
    options = ("--application", folder / "application.yaml", "--out", tmp_path / "out.jsonl", "--seed", 5)
    done = run_command("run", "--plan", tmp_path / "stages.json", *options, "--threads", 1, "--json")
    assert done.code == 0, done.err
    check_results(application_of(folder, 5), {r.id: r for r in read_results(tmp_path / "out.jsonl")})
    assert [(each["name"], each["tp"]) for each in done.json["loadings"]] == [("chain", 2), ("deep", 1), ("wide", 1)]
