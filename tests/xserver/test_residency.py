"""A plan's engines of which only some are loaded: requests wait for theirs, and expected calls find theirs loaded."""

import json
import time
from dataclasses import replace

import pytest

from tests.exegpt.cli.conftest import run_command
from tests.stored_profile import store_profile
from tests.xserver.conftest import schedule_for, started
from tests.xserver.test_plan import ESTIMATE
from xcore import document
from xcore.specs.cluster_plan import Plan, PlannedModel
from xrunner.models.create import create_model

NAMES = ("one", "two", "three")
LOADED = "serving {} on"


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """A plan of three models, each on its own device."""
    folder, models = tmp_path_factory.mktemp("resident"), []
    for place, name in enumerate(NAMES):
        create_model(
            folder / name, "llama", layers=1, hidden=32, heads=2, kv_heads=1, ffn=64, vocab=300, context=128, seed=place
        )
        store_profile(folder / name)
        schedule = schedule_for(folder / name)
        models.append(PlannedModel(name, (place,), schedule, ESTIMATE, directory=str(folder / name)))
    cluster = replace(models[0].schedule.cluster, devices_per_node=3)
    document.write(folder / "plan.json", Plan(Plan.VERSION, "exegpt", cluster, tuple(models)))
    return folder / "plan.json"


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    """An agent that asks, searches for a minute or not at all, and answers."""
    folder, calls = tmp_path_factory.mktemp("graphs"), []
    for run in range(20):
        own, sizes = {"application": "agent", "run": run}, {"input_tokens": 5, "output_tokens": 4}
        calls.append({**own, "unit": "ask", **sizes})
        calls.append({**own, "unit": "search", "parent": "ask", "seconds": 60.0 * (run % 2)})
        calls.append({**own, "unit": "answer", "parent": "search", **sizes})
    (folder / "calls.jsonl").write_text("\n".join(map(json.dumps, calls)))
    assert run_command("graphs", "learn", folder / "calls.jsonl", "--out", folder / "graphs.json").code == 0
    return folder / "graphs.json"


def ask(server, model, run=None, unit=None):
    labels = {"application": "agent", "run": run, "unit": unit} if run else {}
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "metadata": labels}
    status, _, data = server.post("/v1/completions", body)
    assert status == 200, data
    return json.loads(data)


def loads(server, name):
    return server.log.read_text().count(LOADED.format(name))


@pytest.mark.slow
def test_a_request_waits_until_its_model_has_taken_the_place_of_the_least_recently_used(plan, tmp_path):
    with started(["--plan", str(plan), "--resident", "2"], tmp_path, engines=2) as server:
        ask(server, "two")
        ask(server, "one")
        assert [loads(server, name) for name in NAMES] == [1, 1, 0]
        ask(server, "three")
        assert [loads(server, name) for name in NAMES] == [1, 1, 1]
        ask(server, "one")
        assert loads(server, "one") == 1, "two was the one to go"
        assert "the engine of two is unloaded" in server.log.read_text()
        ask(server, "two")
        assert loads(server, "two") == 2


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lru", "prewarm"])
def test_the_model_of_an_expected_call_is_loaded_before_the_call(plan, graphs, tmp_path, policy):
    options = ["--plan", str(plan), "--resident", "1", "--warm-models", policy]
    options += ["--graphs", str(graphs), "--knob", "0.3"] if policy == "prewarm" else []
    with started(options, tmp_path, engines=1) as server:
        ask(server, "one", "first", "ask")
        ask(server, "two", "first", "answer")  # which model answers is known from now on
        ask(server, "one", "second", "ask")
        until = time.monotonic() + (60 if policy == "prewarm" else 5)
        while loads(server, "two") < 2 and time.monotonic() < until:
            time.sleep(0.1)
        assert loads(server, "two") == (2 if policy == "prewarm" else 1)
        ask(server, "two", "second", "answer")
        assert loads(server, "two") == 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--warm-models", "epwq"), "--warm-models epwq needs --resident"),
        (("--resident", "1", "--warm-models", "best"), "--warm-models 'best' is not known: use one of lru, epwq"),
        (("--resident", "1", "--warm-models", "prewarm"), "--warm-models prewarm needs --graphs"),
        (("--resident", "1", "--replan-after", "1m"), "--replan-after needs all engines of the plan"),
        (("--admission", "grow", "--resident", "1"), "The plan determines --admission"),
    ],
)
def test_options_that_contradict_each_other_are_refused(plan, words, sentence):
    done = run_command("serve", "--plan", plan, *words)
    assert done.code == 2 and sentence in done.err and done.err.count("\n") == 1
