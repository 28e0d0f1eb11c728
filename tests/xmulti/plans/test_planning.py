"""Plans of several models: what a file asks for, what each method comes to, and what is refused in one sentence."""

import json
import re
from dataclasses import replace

import pytest

from exegpt.cli import main
from xcore import document
from xcore.errors import Infeasible, InputError
from xcore.specs.cluster import parse_cluster
from xcore.specs.cluster_plan import Plan
from xmulti.plans import model_frontier, plan_answer, planning
from xmulti.plans.demands import read_demands
from xmulti.plans.model_frontier import ModelFrontier
from xmulti.plans.planning import make_plan, propose

CLUSTER = parse_cluster("4xA100-80GB")
CHAT = {"name": "chat", "model": "opt-1.3b", "workload": "128/64", "rate": "20/s", "latency_bound": "4s"}
BATCH = {"name": "batch", "model": "opt-13b", "workload": "128/32", "requests": 500}


def write(path, *models):
    file = path / "models.yaml"
    file.write_text(json.dumps({"models": models}))  # JSON is YAML
    return file


@pytest.fixture(scope="module", autouse=True)
def few_policies():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "_POLICIES", {"exegpt": ("static", "orca"), "spatial": ("orca",)})
        yield


@pytest.fixture(scope="module")
def demands(tmp_path_factory):
    return read_demands(write(tmp_path_factory.mktemp("models"), CHAT, BATCH), "4xA100-80GB")


@pytest.fixture(scope="module")
def plan(demands):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_frontier, "REQUESTS", 8000)
        return make_plan(demands, CLUSTER, "exegpt")


def test_every_model_meets_its_own(plan):
    chat, batch = plan.models
    assert (chat.name, batch.name) == ("chat", "batch")
    assert chat.headroom > 1 and chat.goodput_seq_s > 20 and chat.schedule.latency_bound_s == 4.0
    assert batch.headroom is None and batch.seconds == pytest.approx(500 / batch.estimate.throughput_seq_s)
    assert not set(chat.devices) & set(batch.devices) and set(chat.devices + batch.devices) <= {0, 1, 2, 3}
    for model in plan.models:
        assert model.schedule.cluster.devices == len(model.devices)
        assert {d for stage in model.schedule.stages for d in stage.devices} <= set(range(len(model.devices)))


def test_a_plan_round_trips(plan, tmp_path):
    document.write(tmp_path / "plan.json", plan)
    assert document.read(Plan, tmp_path / "plan.json") == plan
    twice = tuple(replace(model, devices=(0,)) for model in plan.models)
    with pytest.raises(InputError, match="a device may belong to only one model"):
        replace(plan, models=twice)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("chat", {"requests": 5}, "has both a rate and a number of requests"),
        ("chat", {"attainment": 7.0}, "has an attainment of 7: it must be from 0 to 1"),
        ("chat", {"goodput_seq_s": -3.0}, "has goodput_seq_s of -3: it must be at least 0"),
        ("batch", {"seconds": -1.0}, "has seconds of -1: it must be at least 0"),
    ],
)
def test_a_plan_with_impossible_figures_is_refused(plan, name, change, message):
    (model,) = (model for model in plan.models if model.name == name)
    with pytest.raises(InputError, match=f"Model '{name}' of the plan {message}"):
        replace(model, **change)


def test_a_models_file_names_its_traces_columns(tmp_path):
    (tmp_path / "t.csv").write_text("asked,answered\n30,7\n50,9\n")
    entry = CHAT | {"workload": "t.csv"}
    with pytest.raises(InputError, match=r"has no input column .* \(in a models file: columns: input=NAME"):
        read_demands(write(tmp_path, entry), "4xA100-80GB")
    (demand,) = read_demands(write(tmp_path, entry | {"columns": "input=asked,output=answered"}), "4xA100-80GB")
    assert demand.setting.workload.input.mean == 40 and demand.setting.workload.output.mean == 8


def test_a_plans_file_is_shown(plan, tmp_path, capsys):
    document.write(tmp_path / "plan.json", plan)
    assert main(["show", str(tmp_path / "plan.json")]) == 0
    printed = capsys.readouterr().out
    assert "exegpt: 2 models on 4xA100-80GB" in printed and "500 requests" in printed
    assert "       0 │" in printed and "A chat  B batch" in printed, "a picture of the devices"
    assert main(["show", str(tmp_path / "plan.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"] == document.to_dict(plan)


@pytest.mark.slow
def test_searched_budgets_are_no_worse_than_shares_in_proportion(demands):
    proposals = propose(demands, CLUSTER, ("spatial", "exegpt"))
    searched = next(proposal for proposal in proposals if proposal.method == "exegpt")
    assert searched.plan and searched.order == proposals[0].order


def test_what_can_not_be_met_is_named_with_the_nearest(tmp_path):
    hungry = CHAT | {"rate": "100000/s"}
    with pytest.raises(Infeasible, match=r"Model 'chat' .* reaches .*/s of .*/s on 3 devices; the plan sustains 0\.0"):
        make_plan(read_demands(write(tmp_path, hungry, BATCH), "4xA100-80GB"), CLUSTER, "exegpt")
    huge = BATCH | {"model": "opt-66b"}
    with pytest.raises(
        Infeasible, match=r"don't fit on 2xA100-80GB together\. They need at least a 2, b 2 devices \(4 in all\)"
    ):
        named = [huge | {"name": name} for name in "ab"]
        make_plan(read_demands(write(tmp_path, *named), "2xA100-80GB"), parse_cluster("2xA100-80GB"), "exegpt")


@pytest.mark.parametrize(
    ("method", "way"),
    [
        (
            "exegpt",
            " (batch, more can't share devices, because they have no rate or have an encoder): use more devices, "
            "or plan fewer models.",
        ),
        (
            "spatial",
            ": use more devices, let models share devices (--method exegpt, for models with rates), or plan fewer "
            "models.",
        ),
    ],
)
def test_no_method_advises_what_it_has_tried(method, way, tmp_path):
    demands = read_demands(write(tmp_path, BATCH, BATCH | {"name": "more"}), "1xA100-80GB")
    with pytest.raises(Infeasible) as refused:
        make_plan(demands, parse_cluster("1xA100-80GB"), method)
    assert str(refused.value).endswith(f"but there are 1{way}")


@pytest.mark.slow
def test_rates_that_are_named_as_nearest_are_sustained(tmp_path):
    hungry = CHAT | {"rate": "100000/s"}
    one = parse_cluster("1xA100-80GB")
    with pytest.raises(Infeasible) as refused:
        make_plan(read_demands(write(tmp_path, hungry), "1xA100-80GB"), one, "exegpt")
    said = re.search(
        r"reaches ([\d,.]+)/s of 100,000/s on 1 device; the plan sustains ([\d.]+) times", str(refused.value)
    )
    assert said and float(said[2]) * 100_000 == pytest.approx(float(said[1].replace(",", "")), rel=0.01)
    again = CHAT | {"rate": f"{0.9 * float(said[2]) * 100_000}/s"}
    assert make_plan(read_demands(write(tmp_path, again), "1xA100-80GB"), one, "exegpt").headroom >= 1


@pytest.mark.parametrize("model", [pytest.param(CHAT, marks=pytest.mark.slow), BATCH])
def test_a_bound_that_is_named_as_the_tightest_is_met(model, tmp_path):
    one = parse_cluster("1xA100-80GB")
    with pytest.raises(Infeasible) as refused:
        make_plan(read_demands(write(tmp_path, model | {"latency_bound": "10ms"}), "1xA100-80GB"), one, "exegpt")
    said = re.search(r"meets its bound of 10 ms on no part .* tightest .* is (.*?), on 1 device:", str(refused.value))
    assert said
    value, unit = said[1].split()
    rate = {"rate": "0.01/s"} if "rate" in model else {}
    near = model | {"latency_bound": f"{1.01 * float(value)}{unit}"} | rate
    assert make_plan(read_demands(write(tmp_path, near), "1xA100-80GB"), one, "exegpt").models[0].schedule
    tight = model | {"latency_bound": f"{0.5 * float(value)}{unit}"} | rate
    with pytest.raises(Infeasible):
        make_plan(read_demands(write(tmp_path, tight), "1xA100-80GB"), one, "exegpt")


def test_a_model_that_fits_nowhere_is_named(tmp_path):
    with pytest.raises(Infeasible, match="Model 'batch' fits on no part of 1xA100-80GB: use more devices"):
        big = BATCH | {"model": "opt-66b"}
        make_plan(read_demands(write(tmp_path, big), "1xA100-80GB"), parse_cluster("1xA100-80GB"), "exegpt")


def test_replicas_are_limited_where_a_method_places_them(tmp_path, capsys):
    command = ["plan", str(write(tmp_path, BATCH)), "-c", "1xA100-80GB", "--replicas", "2", "--method"]
    assert main([*command, "muxserve"]) == main([*command, "samullm"]) == 2
    assert capsys.readouterr().err.count("--replicas is for methods that place replicas, and ") == 2


def test_replicas_beside_the_stages_of_an_application_are_refused(tmp_path, capsys):
    (tmp_path / "application.yaml").write_text("nodes: []\n")
    file = str(tmp_path / "application.yaml")
    assert main(["plan", file, "--cluster", "1xA100-80GB", "--method", "best", "--replicas", "2"]) == 2
    assert "--replicas applies to plans of budgets" in capsys.readouterr().err


@pytest.mark.slow
def test_no_table_where_no_method_has_a_plan(tmp_path, capsys):
    file = write(tmp_path, CHAT | {"rate": "5000/s", "latency_bound": "1s"})
    assert main(["plan", str(file), "-c", "1xA100-80GB", "--method", "best"]) == 3
    printed = capsys.readouterr()
    assert "methods" not in printed.out and "headroom" not in printed.out
    assert "on 1 device;" in printed.err and "1 devices" not in printed.err


@pytest.mark.parametrize("prices", ["models: 7", "A40: 1", "A100-80GB: cheap", "7"])
def test_bad_prices_are_refused_before_a_search(prices, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plan_answer, "propose", lambda *asked: pytest.fail("it has searched"))
    file = tmp_path / "prices.yaml"
    file.write_text(prices)
    command = ["plan", str(write(tmp_path, CHAT)), "-c", "4xA100-80GB", "--price", str(file)]
    assert main(command) == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said and ("price" in said or "has no A100-80GB" in said)


@pytest.mark.parametrize(
    ("models", "sentence"),
    [
        ([CHAT | {"requests": 5}], "Model 'chat' needs a rate, like 5/s, or a number of requests, but not both"),
        ([CHAT, CHAT], "names 'chat' twice"),
        ([], "has 0 models"),
        ([CHAT | {"colour": "red"}], "colour is not known"),
        ([CHAT | {"rat": "5/s"}], "models.0.rat is not known; instead of rat write rate"),
        ([BATCH | {"requests": True}], "models.0.requests must be a whole number (got True)"),
        ([CHAT | {"model": "opt-14b"}], "Model 'chat' of"),
        ([CHAT | {"rate": "often"}], "often"),
        ([CHAT | {"rate": ""}], "Model 'chat' of"),
        ([BATCH | {"latency_bound": ""}], "'' is not a duration"),
        ([BATCH | {"requests": 0}], "has 0 requests"),
        ([BATCH | {"requests": 10**20}], "has 100,000,000,000,000,000,000 requests: it must have 1 to 1,000,000"),
        ([BATCH | {"requests": 10**9}], "has 1,000,000,000 requests: it must have 1 to 1,000,000"),
        ([CHAT | {"name": ""}], "A model has the name ''"),
        (
            [CHAT | {"name": "a=b"}],
            "A model has the name 'a=b': a name in --model NAME=DIR has 1 to 200 letters, without '='",
        ),
        ([CHAT | {"name": "a\nb"}], r"A model has the name 'a\nb'"),
        ([CHAT | {"rate": 5}], "models.0.rate is 5, which has no unit: write 5/s"),
        ([CHAT | {"latency_bound": 2.5}], "models.0.latency_bound is 2.5, which has no unit: write 5s"),
    ],
)
def test_a_bad_file_is_refused_in_one_sentence(models, sentence, tmp_path, capsys):
    assert main(["plan", str(write(tmp_path, *models)), "--cluster", "4xA100-80GB"]) == 2
    said = capsys.readouterr().err.strip()
    assert sentence in said and "\n" not in said


def test_a_bad_cluster_is_no_models_fault(tmp_path, capsys):
    file = str(write(tmp_path, CHAT))
    for words, sentence in (
        (["4xZ80"], "exegpt: There is no device kind 'Z80'"),
        (["1xA40", "--gpu-memory-fraction", "nan"], "exegpt: The memory fraction nan is not usable"),
    ):
        assert main(["plan", file, "--cluster", *words]) == 2
        assert capsys.readouterr().err.startswith(sentence)


def test_an_application_file_is_known(tmp_path, capsys):
    (tmp_path / "application.yaml").write_text("nodes: []\nedges: []\n")
    assert main(["plan", str(tmp_path / "application.yaml"), "--cluster", "4xA100-80GB"]) == 2
    assert "plan it with --method samullm" in capsys.readouterr().err


def test_a_traces_file_is_looked_for_beside_the_models(tmp_path):
    (tmp_path / "chat.csv").write_text("input,output\n" + "100,50\n" * 30)
    (demand,) = read_demands(write(tmp_path, CHAT | {"workload": "chat.csv"}), "4xA100-80GB")
    assert demand.setting.workload.input.mean == 100


@pytest.mark.slow
def test_the_command_prints_a_document(tmp_path, capsys):
    file, out = write(tmp_path, CHAT, BATCH), tmp_path / "plan.json"
    assert main(["plan", str(file), "-c", "4xA100-80GB", "--method", "best", "--out", str(out), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["plan"] == document.read_json(out)
    assert (
        {m["method"] for m in printed["methods"]} == {*planning.METHODS, "samullm"} >= {"exegpt", "spatial", "muxserve"}
    )
    refused = next(m for m in printed["methods"] if m["method"] == "muxserve")
    assert refused["plan"] is None and "'batch' has no rate" in refused["reason"]
    assert main(["plan", str(write(tmp_path, CHAT | {"rate": "100000/s"})), "-c", "1xA100-80GB", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["plan"] is None


@pytest.mark.slow
def test_reports_and_prices(tmp_path, capsys):
    prices, report = tmp_path / "prices.yaml", tmp_path / "plan.html"
    prices.write_text("A100-80GB: 2")
    command = ["plan", str(write(tmp_path, CHAT)), "-c", "1xA100-80GB", "--price", str(prices)]
    assert main([*command, "--report", str(report)]) == 0
    printed, page = capsys.readouterr().out, report.read_text()
    assert re.search(r"exegpt .* 1 of 1 +1 per hour +2\s", printed), "said for a single method too"
    assert "normalised" in printed and "in time" in printed and "shared by" not in printed, "nobody shares"
    assert (
        "<svg" in page
        and page.count("<table>") == 2
        and "1 per hour" in page
        and "exegpt: 1 model on 1xA100-80GB" in page
    )
    assert main([*command, "--json"]) == 0
    (method,) = json.loads(capsys.readouterr().out)["methods"]
    assert (method["price_per_hour"], method["gpu_hours"]) == (2.0, None)
    assert method["plan"]["models"][0]["normalised_latency"] > 1


def test_hours_of_devices_are_until_their_requests_are_done(plan):
    batch = plan.models[1]
    alone = replace(plan, models=(batch,))
    assert alone.gpu_hours == pytest.approx(len(batch.devices) * batch.seconds / 3600) and plan.gpu_hours is None


def test_a_frontier_is_searched_once(demands, monkeypatch):
    frontier, asked = ModelFrontier(demands[1], ("orca",)), []
    monkeypatch.setattr("xmulti.plans.model_frontier._offline", lambda *given: asked.append(given))
    assert frontier.on(2) is None and frontier.on(2) is None and len(asked) == 1


@pytest.mark.slow
def test_a_plan_of_a_t5_promises_what_tune_predicts(tmp_path):
    """Requests longer than its `n_positions` aren't clipped, since its positions are relative."""
    from xscheduler.setting_search import search_schedule
    from xscheduler.settings import find_setting

    t5 = {"name": "t5", "model": "t5-large", "workload": "2048/256", "rate": "1/s", "latency_bound": "6s"}
    one = "1xA100-80GB"
    planned = make_plan(read_demands(write(tmp_path, t5), one), parse_cluster(one), "exegpt")
    best = search_schedule(find_setting("t5-large", one, "2048/256", "roofline"), None, policies=("static", "orca"))
    assert planned.models[0].goodput_seq_s == pytest.approx(best.estimate.throughput_seq_s, rel=0.25)
