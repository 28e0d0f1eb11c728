"""What a plan would gain, held against plans of the changed problem from nothing."""

import json
from dataclasses import replace

import pytest

from exegpt.cli import main
from xcore.errors import InputError
from xcore.specs.cluster import parse_cluster
from xmulti.plans import planning
from xmulti.plans.demands import read_demands
from xmulti.plans.model_frontier import Frontiers
from xmulti.plans.plan_advice import LOOSER, PlanGain, advice_about, gains, one_more, tightest_of
from xmulti.plans.planning import propose

CHAT = {"name": "chat", "model": "opt-1.3b", "workload": "128/64", "rate": "40/s", "latency_bound": "2s"}
CODE = {"name": "code", "model": "opt-2.7b", "workload": "256/32", "rate": "5/s", "latency_bound": "1s"}
BATCH = {"name": "batch", "model": "opt-2.7b", "workload": "128/32", "requests": 200}


@pytest.fixture(autouse=True)
def few_policies(monkeypatch):
    monkeypatch.setattr(planning, "_POLICIES", {"exegpt": ("static", "orca"), "spatial": ("orca",)})


def write(path, *models):
    file = path / "models.yaml"
    file.write_text(json.dumps({"models": models}))
    return file


def asked(path, cluster, *models):
    demands = read_demands(write(path, *models), cluster)
    return demands, demands[0].setting.cluster


@pytest.mark.slow
@pytest.mark.parametrize("method", ["exegpt", "spatial"])
def test_gains_are_those_of_planning_anew(method, tmp_path):
    frontiers, (demands, cluster) = Frontiers(), asked(tmp_path, "2xA40", CHAT, CODE)
    now = propose(demands, cluster, (method,), frontiers)[0]
    larger, looser = gains(demands, cluster, (method,), now.plan or now.near, frontiers)
    assert (larger.cluster, larger.model, looser.cluster) == ("3xA40", None, "2xA40")
    (want,) = propose(*asked(tmp_path, "3xA40", CHAT, CODE), (method,))
    assert larger.headroom == pytest.approx(want.headroom, rel=1e-9) and not larger.reason
    tightest = next(model for model in (CHAT, CODE) if model["name"] == looser.model)
    bound = float(tightest["latency_bound"].rstrip("s"))
    assert looser.latency_bound_s == LOOSER * bound
    models = [m | {"latency_bound": f"{LOOSER * bound}s"} if m is tightest else m for m in (CHAT, CODE)]
    (want,) = propose(*asked(tmp_path, "2xA40", *models), (method,))
    assert looser.headroom == pytest.approx(want.headroom, rel=1e-9)


def test_what_has_no_plan_may_have_one_with_one_device_more(tmp_path):
    large = BATCH | {"model": "opt-30b"}
    demands, cluster = asked(tmp_path, "1xA40", large)
    now = propose(demands, cluster, ("exegpt",))[0]
    assert now.plan is None
    (larger,) = gains(demands, cluster, ("exegpt",), now.near, Frontiers())
    (want,) = propose(*asked(tmp_path, "2xA40", large), ("exegpt",))
    assert larger.seconds == want.seconds > 0 and larger.headroom is None
    assert larger.text(None).startswith("One more device (2xA40): all requests are finished after ")


def test_what_has_no_plan_either_says_why(tmp_path):
    demands, cluster = asked(tmp_path, "1xA40", BATCH)

    def refuses(*asked):
        raise InputError("No.")

    (larger,) = gains(demands, cluster, ("exegpt",), None, Frontiers(), find=refuses)
    assert larger.headroom is None and larger.text(None) == "One more device (2xA40): there is no plan: No"


def test_of_several_nodes_it_is_one_more_node():
    assert one_more(parse_cluster("2x8xA40")).name == "3x8xA40" and one_more(parse_cluster("2x8xA40")).devices == 24
    assert one_more(parse_cluster("8xA40")) == parse_cluster("9xA40")


def test_the_tightest_has_the_least_headroom_and_a_bound(tmp_path):
    free = CODE | {"name": "free"}
    del free["latency_bound"]
    demands, cluster = asked(tmp_path, "3xA40", CHAT, CODE, free)
    assert tightest_of(demands, None).name == "code", "the shortest bound where nothing is planned"
    plan = propose(demands, cluster, ("spatial",))[0].plan
    bounded = [model for model in plan.models if model.name != "free"]
    assert tightest_of(demands, plan).name == min(bounded, key=lambda model: model.headroom).name
    assert tightest_of(demands[2:], plan) is None


def test_sentences_name_what_is_now(tmp_path):
    gain = PlanGain("A change", "2xA40", None, None, 2.5, 90.0, "")
    assert gain.text(None) == "A change: every model can reach 2.5 times its rate; all requests are finished after 90 s"


def test_no_advice_is_promised_where_there_is_none(tmp_path):
    demands, cluster = asked(tmp_path, "2x2xA40", CHAT, BATCH)
    assert advice_about(demands, cluster) == "one more node or a looser bound"
    assert advice_about(demands[1:], parse_cluster("2xA40")) == "one more device"
    cpu = replace(cluster, device=replace(cluster.device, kind="cpu"), nodes=1)
    assert advice_about(demands, cpu) == "a looser bound"
    assert advice_about(demands[1:], cpu) == "" and not gains(demands[1:], cpu, ("spatial",), None, Frontiers())


@pytest.mark.slow
def test_the_command_advises_where_it_is_asked(tmp_path, capsys):
    file, report = write(tmp_path, CHAT), tmp_path / "plan.html"
    command = ["plan", str(file), "-c", "1xA40", "--method", "spatial"]
    assert main([*command, "--advice", "--report", str(report), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["advice"]
    assert [(gain["cluster"], gain["model"]) for gain in printed] == [("2xA40", None), ("1xA40", "chat")]
    assert printed[0]["headroom"] > 1 and printed[0]["text"].startswith("One more device (2xA40): every model can")
    assert all(gain["text"].replace("'", "&#x27;") in report.read_text() for gain in printed)
    assert main([*command, "--advice"]) == 0
    said = capsys.readouterr().out
    assert "Advice:" in said and "A bound of 3 s for 'chat': every model can reach " in said
    assert main(command) == 0
    assert "--advice predicts the effect of one more device or a looser bound." in capsys.readouterr().out
    assert main(["plan", str(write(tmp_path, BATCH)), "-c", "1xA40", "--method", "samullm", "--advice"]) == 2
    assert "--advice applies to plans of budgets" in capsys.readouterr().err
