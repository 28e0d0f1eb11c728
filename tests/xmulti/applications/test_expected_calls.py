"""Applications in models files: what models are planned for, against a run's own calls; and what is refused."""

import json
import re

import pytest

from tests.exegpt.cli.conftest import run_command
from xcore import document
from xcore.specs.cluster_plan import Plan
from xcore.specs.workload import RequestLengths
from xmulti.applications.expected_calls import expected_calls
from xmulti.applications.planned_application import plan_application
from xmulti.files.models_file import read_models
from xmulti.plans.demands import read_demands
from xmulti.sharing.call_replay import replay_calls

CLUSTER = "4xA100-80GB"
MODELS = [
    {"name": "chat", "model": "opt-1.3b", "workload": "128/64", "requests": 40},
    {"name": "small", "model": "opt-1.3b"},
    {"name": "judge", "model": "opt-2.7b"},
]
NODES = [
    {"name": "chain", "model": "small", "workload": "S", "requests": 6, "rounds": [3, 1, 2, 1, 1, 4]},
    {"name": "title", "model": "small", "workload": "40/8", "longest_output": 6},
    {"name": "judge", "model": "any", "workload": "100/30", "times": 2},
]
EDGES = [
    {"source": "chain", "target": "chain"},
    {"source": "chain", "target": "judge", "kind": "final"},
    {"source": "chain", "target": "title", "kind": "separate"},
]


def write(path, models=MODELS, nodes=NODES, edges=EDGES, **more):
    (path / "apps.yaml").write_text(json.dumps({"nodes": nodes, "edges": edges}))
    file = path / "models.yaml"
    file.write_text(json.dumps({"models": models, "applications": "apps.yaml", **more}))
    return file


def pairs(rows):
    return sorted((row.input, row.output) for row in rows)


def plan_of(file, tmp_path):
    options = ("--cluster", CLUSTER, "--method", "spatial", "--out", tmp_path / "plan.json", "--json")
    done = run_command("plan", file, *options)
    assert done.code == 0, done.err
    return document.read(Plan, tmp_path / "plan.json"), done.json


def test_models_are_planned_for_the_calls_that_a_run_makes(tmp_path):
    """The run's calls, one after the other, have the lengths and numbers that the models were planned for; and the
    replay of those calls on the plan takes the seconds that are printed.
    """
    file = write(tmp_path)
    plan, shown = plan_of(file, tmp_path)
    run = plan_application(tmp_path / "apps.yaml", plan, 0)
    calls = run.calls()
    made, waiting = {"small": [], "judge": []}, calls.begin()
    while waiting:
        chain = waiting.pop()
        prompt = calls.prompt(chain)
        request = run.request(chain, prompt)
        made[run.models[chain.node.name].name].append(RequestLengths(len(prompt), request.max_tokens))
        waiting += calls.end(chain, (7,) * request.max_tokens)
    chat, small, judge = read_demands(file, CLUSTER)
    assert (chat.requests, small.requests, judge.requests) == (40, 12 + 12, 12)
    assert pairs(small.setting.workload.requests) == pairs(made["small"])
    assert pairs(judge.setting.workload.requests) == pairs(made["judge"])
    assert [model.requests for model in plan.models] == [40, 24, 12]
    profiles = {demand.name: demand.setting.profile for demand in (chat, small, judge)}
    models = {node: model.name for node, model in run.models.items()}
    replayed = replay_calls(plan, lambda model: profiles[model.name], run.lengths(), models, run.output_tokens)
    assert shown["application"] == {"calls": 36, "seconds": pytest.approx(replayed.seconds)}
    assert set(replayed.finish_s) == {f"{name}/{i}/0" for name in ("judge", "title") for i in range(12)} | {
        f"chain/{i}/{j}" for i, rounds in enumerate(NODES[0]["rounds"]) for j in range(rounds)
    }
    expected = expected_calls(file, read_models(file))
    ends = expected.replayed(plan, {demand.name: demand.setting.profile for demand in (chat, small, judge)}).finish_s
    for chain in (chain for chains in expected.calls().chains.values() for chain in chains):
        for source, at in chain.reads:  # no call ends before what it reads
            assert ends[chain.call(0)] > ends[source.call(len(source.own) - 1 if at is None else at)]


def test_without_an_application_nothing_is_said_of_one(tmp_path):
    file = tmp_path / "models.yaml"
    file.write_text(json.dumps({"models": MODELS[:1]}))
    assert expected_calls(file, read_models(file)) is None
    _, shown = plan_of(file, tmp_path)
    assert shown["application"] is None


@pytest.mark.slow
def test_the_application_is_printed(tmp_path):
    done = run_command("plan", write(tmp_path), "--cluster", CLUSTER, "--method", "spatial")
    assert done.code == 0 and "36 calls of the application: done in" in done.out, done.err


SMALL = MODELS[1]
LONG = {"name": "small", "model": "any", "workload": "3000/5", "requests": 1}
REFUSED = {
    "round": ({"edges": [*EDGES, {"source": "judge", "target": "chain"}]}, "apps.yaml': The edges .* form a cycle"),
    "unknown": (
        {"nodes": [*NODES, NODES[0] | {"name": "n", "model": "m"}]},
        "Node 'n' of .* names no model of .* chat",
    ),
    "both": ({"models": [*MODELS[:1], SMALL | {"requests": 5}, MODELS[2]]}, "'small' takes its calls from 'apps.yaml'"),
    "its workload": ({"models": [*MODELS[:1], SMALL | {"workload": "S"}, MODELS[2]]}, "leave out its workload, rate"),
    "no calls": ({"models": [*MODELS, {"name": "idle", "model": "opt-1.3b"}]}, "'idle' needs a rate"),
    "no workload": ({"models": [*MODELS, {"name": "x", "model": "opt-1.3b", "rate": "1/s"}]}, "'x' needs a workload"),
    "no file": ({"applications": "gone.yaml"}, "no application file .*gone.yaml"),
    "no room": ({"nodes": [LONG, NODES[2] | {"requests": 1}], "edges": []}, "prompt of 3,000 tokens"),
    "rounds": ({"nodes": [NODES[0] | {"requests": 2}, *NODES[1:]]}, "2 requests and 6 numbers of rounds"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(tmp_path, case):
    changes, words = REFUSED[case]
    done = run_command("plan", write(tmp_path, **changes), "--cluster", CLUSTER, "--method", "spatial")
    assert done.code == 2 and done.err.count("\n") == 1, done.err
    assert re.search(words, done.err), done.err


def test_stages_are_planned_for_the_application_itself(tmp_path):
    done = run_command("plan", write(tmp_path), "--cluster", CLUSTER, "--method", "samullm")
    assert done.code == 2 and "pass that file instead" in done.err


def test_a_models_file_without_one_needs_requests_as_before(tmp_path):
    file = tmp_path / "models.yaml"
    for model, words in ((SMALL, "needs a rate"), (MODELS[0] | {"workload": None}, "needs a workload")):
        file.write_text(json.dumps({"models": [model]}))
        done = run_command("plan", file, "--cluster", CLUSTER)
        assert done.code == 2 and words in done.err
