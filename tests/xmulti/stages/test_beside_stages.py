"""`exegpt plan --method best` for numbers of requests: stages beside budgets, by when all requests are done."""

import json
from dataclasses import replace

import pytest

from tests.exegpt.cli.conftest import run_command
from xcore import document
from xcore.specs.cluster_plan import Plan
from xmulti.files.stage_plan import StagePlan
from xmulti.plans import planning
from xmulti.plans.demands import read_demands
from xmulti.plans.plan_answer import beside_stages, loading_of
from xmulti.plans.planning import Proposal, propose

CLUSTER = "2xA100-80GB"
LONG = {"name": "long", "model": "llama-2-7b", "workload": "512/300", "requests": 400}
SHORT = {"name": "short", "model": "opt-1.3b", "workload": "128/32", "requests": 100}
ONE = {"name": "one", "model": "llama-2-7b", "workload": "128/64", "requests": 200}
LOAD_S = 6.738e9 * 2 / 0.87e9
"""Of llama-2-7b on one device."""


@pytest.fixture(autouse=True)
def few_policies(monkeypatch):
    monkeypatch.setattr(planning, "_POLICIES", {"exegpt": ("static", "orca"), "spatial": ("orca",)})


def write(path, *models, **keys):
    file = path / "models.yaml"
    file.write_text(json.dumps({"models": models, **keys}))  # JSON is YAML
    return file


def plan(*words):
    return run_command("plan", *words, "--cluster", CLUSTER, "--method", "best")


def test_stages_are_the_best_for_models_of_different_lengths(tmp_path):
    out, report = tmp_path / "plan.json", tmp_path / "plan.html"
    prices = tmp_path / "prices.yaml"
    prices.write_text("A100-80GB: 2")
    done = plan(write(tmp_path, LONG, SHORT), "--out", out, "--report", report, "--price", prices)
    assert done.code == 0, done.err
    assert "samullm is best: all requests are finished after" in done.out and ", including loading." in done.out
    assert "loaded and done in" in done.out and "2 of 2" in done.out
    assert "loading" in done.err and "muxserve: Model 'long' has no rate" in done.err
    stages = document.read(StagePlan, out)
    assert stages.method == "samullm" and set(stages.nodes) == {"long", "short"}
    shown = run_command("show", out)
    assert "samullm: " in shown.out and "A long  B short" in shown.out
    page = report.read_text()
    assert "samullm is best" in page and page.count("<svg") == 1


def test_budgets_are_the_best_for_models_that_are_alike(tmp_path):
    out = tmp_path / "plan.json"
    done = plan(write(tmp_path, ONE, ONE | {"name": "two"}), "--out", out, "--json")
    assert done.code == 0, done.err
    best = document.read(Plan, out)
    assert done.json["plan"] == document.to_dict(best) and best.method == "exegpt"
    methods = {method["method"]: method for method in done.json["methods"]}
    ours, stages = methods["exegpt"], methods["samullm"]
    assert ours["seconds"] == pytest.approx(best.models[0].seconds + LOAD_S, rel=1e-3), "loading counts"
    assert ours["gpu_hours"] == pytest.approx(2 * ours["seconds"] / 3600)
    assert stages["seconds"] == stages["plan"]["stages"][-1]["end_s"] >= ours["seconds"]
    assert stages["gpu_hours"] == pytest.approx(2 * stages["seconds"] / 3600, rel=0.01)
    assert "including loading" in done.json["why"] and "samullm" in done.json["why"]
    assert any("compared with loading" in text for text in done.json["assumptions"])
    assert "exegpt: 2 models" in run_command("show", out).out


def test_models_that_do_not_fit_at_once_come_in_stages(tmp_path):
    file = write(tmp_path, ONE, ONE | {"name": "two"}, SHORT)
    done = plan(file, "--json", "--out", tmp_path / "plan.json")
    assert done.code == 0 and done.json["plan"]["method"] == "samullm" and done.json["why"]
    refused = next(method for method in done.json["methods"] if method["method"] == "exegpt")
    assert refused["plan"] is None and refused["seconds"] is None and "don't fit" in refused["reason"]
    assert run_command("plan", file, "--cluster", CLUSTER).code == 3, "without stages there is no plan"


def test_advice_beside_stages_is_about_budgets(tmp_path):
    done = plan(write(tmp_path, LONG, SHORT), "--advice")
    assert "Advice about budgets:" in done.out and "One more device (3xA100-80GB)" in done.out


@pytest.mark.parametrize(
    ("model", "cluster", "reason"),
    [
        ({"requests": None, "rate": "5/s"}, CLUSTER, "has a rate or a bound"),
        ({"latency_bound": "60s"}, CLUSTER, "has a rate or a bound"),
        ({}, "2x1xA100-80GB", "has 2 nodes, but plans of stages support one"),
        ({"model": "t5-3b"}, CLUSTER, "is an encoder-decoder"),
    ],
)
def test_what_has_no_stages_says_why_and_counts_no_loading(tmp_path, model, cluster, reason):
    file = write(tmp_path, {key: value for key, value in (SHORT | model).items() if value is not None})
    demands = read_demands(file, cluster)
    budgets = propose(demands, demands[0].setting.cluster, ("spatial",))
    best, staged = beside_stages(budgets, demands, file, cluster)
    assert staged.method == "samullm" and staged.found is None and reason in staged.why_not
    assert best == budgets[0] and not best.loading_s


def test_the_device_with_the_most_layers_loads_longest(tmp_path):
    demands = read_demands(write(tmp_path, ONE), CLUSTER)
    (alone,) = (proposal.plan for proposal in propose(demands, demands[0].setting.cluster, ("spatial",)))
    (model,) = alone.models
    assert loading_of(alone, demands)["one"] == pytest.approx(LOAD_S, rel=1e-3)
    (stage,) = model.schedule.stages
    first, second = (replace(stage, decoder_layers=layers) for layers in ((0, 12), (12, 32)))
    piped = replace(model, schedule=replace(model.schedule, stages=(first, second)))
    assert loading_of(replace(alone, models=(piped,)), demands)["one"] == pytest.approx(LOAD_S * 20 / 32, rel=1e-3)


def test_stages_come_before_a_method_without_a_plan():
    stages = StagePlan(1, "samullm", 2, 2, (), 0.0)
    ours, theirs = Proposal("samullm", None, stages=stages), Proposal("exegpt", None)
    assert ours.order < theirs.order and ours.why_before(theirs) == "exegpt has no plan"


def test_an_application_can_only_be_planned_in_stages(tmp_path):
    file = tmp_path / "application.yaml"
    file.write_text(json.dumps({"nodes": [SHORT | {"load": "5s"}]}))
    done = plan(file, "--json")
    assert done.code == 0, done.err
    assert [method["method"] for method in done.json["methods"]] == ["samullm", "samullm-max", "samullm-min"]
    refused = plan(file, "--advice")
    assert (refused.code, refused.err.count("\n")) == (2, 1) and "--advice applies to plans of budgets" in refused.err
