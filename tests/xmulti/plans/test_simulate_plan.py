"""`simulate --plan`: replays of a plan at its rates and of a trace that names each request's model."""

import json

import numpy as np
import pytest

from exegpt.cli import main
from tests.xmulti.sharing.test_shared_devices import BUSY, CLUSTER, IDLE, RARE, demands_of
from xcore import document
from xcore.errors import InputError
from xmulti.plans import simulate_plan as simulating
from xmulti.plans.planning import make_plan
from xmulti.plans.simulate_plan import simulate_plan
from xmulti.serving.planned_units import read_plan_file


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    plan = make_plan(demands_of(folder, BUSY, IDLE, RARE), CLUSTER, "muxserve")
    document.write(folder / "plan.json", plan)
    return folder / "plan.json"


@pytest.fixture
def written(seallm_plan, tmp_path):
    document.write(tmp_path / "plan.json", seallm_plan)
    return tmp_path / "plan.json"


@pytest.mark.slow
def test_at_their_rates_all_models_meet_their_bounds(path, capsys, tmp_path):
    assert main(["simulate", "--plan", str(path), "--timeline", str(tmp_path / "trace.json"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [model["name"] for model in facts["models"]] == ["busy", "idle", "rare"]
    assert all(model["attainment"] >= 0.99 for model in facts["models"])
    assert max(model["requests"] for model in facts["models"]) == 10_000, "of the busy one, as long as it is"
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(named.values()) == {"busy", "idle", "rare"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} == set(named), "whose each span is"
    assert main(["simulate", "--plan", str(path)]) == 0
    assert "in time" in capsys.readouterr().out


@pytest.mark.slow
def test_models_of_one_rate_have_requests_of_their_own(path, monkeypatch):
    asked = {}
    monkeypatch.setattr(
        simulating, "replay_plan", lambda plan, profiles, requests, timeline, order: asked.update(requests) or {}
    )
    simulate_plan(path, None, None)
    idle, rare = ([request.arrival_s for request in asked[name]] for name in ("idle", "rare"))
    assert len(idle) == len(rare) and abs(np.corrcoef(np.diff(idle), np.diff(rare))[0, 1]) < 0.3


@pytest.mark.slow
def test_a_traces_requests_are_replayed(path, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("model,input,output,arrival\nidle,100,20,5.0\nbusy,50,10,4.5\nidle,80,30,6.0\n")
    facts = {model["name"]: model for model in simulate_plan(path, trace, None).facts["models"]}
    assert set(facts) == {"busy", "idle"} and facts["idle"]["requests"] == 2
    assert facts["idle"]["seconds"] > 1.5  # from the first arrival on


def test_a_trace_may_have_columns_of_other_names_and_another_form(path, tmp_path, capsys):
    rows = [("idle", 100, 20, 5.0), ("busy", 50, 10, 4.5), ("idle", 80, 30, 6.0)]
    usual, other = tmp_path / "usual.csv", tmp_path / "other.jsonl"
    usual.write_text("model,input,output,arrival\n" + "".join(f"{','.join(map(str, row))}\n" for row in rows))
    names = ("model", "asked", "answered", "when")
    other.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    models = []
    for trace in ([usual], [other, "--columns", "input=asked,output=answered,arrival_s=when"]):
        assert main(["simulate", "--plan", str(path), "--json", "--replay", *map(str, trace)]) == 0
        models.append(json.loads(capsys.readouterr().out)["models"])
    assert models[0] == models[1]
    assert main(["simulate", "--plan", str(path), "--columns", "input=asked,output=answered"]) == 2
    assert "names columns of a trace, but there is no trace" in capsys.readouterr().err


def test_requests_beyond_a_models_context_are_scaled_on_request_as_those_of_one_model_are(path, tmp_path):
    context = {model.name: model.schedule.model.spec.context for model in read_plan_file(path).models}
    trace = tmp_path / "trace.csv"
    trace.write_text(f"model,input,output\nidle,{3 * context['idle']},{context['idle']}\nbusy,50,10\n")
    with pytest.raises(InputError, match="None of the 1 rows of idle fits the context"):
        simulate_plan(path, trace, None)
    prediction = simulate_plan(path, trace, None, scale=True)
    (note,) = [text for text in prediction.assumptions if "context" in text]
    assert note.startswith("idle: the lengths of workload idle are multiplied by 0.25 to fit the context")
    trace.write_text(f"model,input,output\nidle,{3 * context['idle'] // 4},{context['idle'] // 4}\nbusy,50,10\n")
    fits = simulate_plan(path, trace, None)
    assert fits.facts["models"] == prediction.facts["models"]
    assert not any("context" in text for text in fits.assumptions)


def test_options_that_a_plan_says_itself_are_refused(written, capsys):
    assert main(["simulate", "--plan", str(written), "--model", "opt-13b"]) == 2
    assert "--model cannot be combined with --plan" in capsys.readouterr().err
    assert main(["simulate", "--plan", str(written), "--replay", "missing.csv"]) == 2
    assert "There is no trace file 'missing.csv'" in capsys.readouterr().err
    assert main(["simulate", "--plan", str(written), "--replay", str(written.parent)]) == 2
    assert "is a folder: name a trace file in it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"control": {"max_num_seqs": 0}}, "models.0.schedule: The control variables of policy "),
        ({"policy": "magic"}, "models.0.schedule: There is no policy 'magic'"),
        ({"replicas": 2}, "Model 'busy' has 1 device, but a schedule for 2: run `exegpt plan` again"),
    ],
)
def test_a_schedule_that_can_not_be_followed_is_refused(change, sentence, written, tmp_path, capsys):
    plan = document.read_json(written)
    plan["models"][0]["schedule"] |= change
    (tmp_path / "odd.json").write_text(document.dumps(plan))
    assert main(["simulate", "--plan", str(tmp_path / "odd.json")]) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err and printed.err.count("\n") == 1


def test_one_model_is_counted_as_one(written, tmp_path, capsys):
    trace = tmp_path / "trace.csv"
    trace.write_text("model,input,output\nidle,100,20\n")
    assert main(["simulate", "--plan", str(written), "--replay", str(trace)]) == 0
    assert ": 1 model on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rate_seq_s": -1}, "Model 'busy' of the plan has a rate of -1/s: it must be above 0"),
        ({"rate_seq_s": 0}, "a rate of 0/s"),
        ({"requests": -5}, "has -5 requests: it needs at least 1"),
        ({"requests": 10**9, "rate_seq_s": None}, "has 1,000,000,000 requests: it must have 1 to 1,000,000"),
        ({"devices": []}, "has no devices"),
        ({"name": "idle"}, "has model 'idle' twice on the devices"),
    ],
)
def test_a_plan_with_odd_numbers_is_refused(change, sentence, written, tmp_path, capsys):
    plan = document.read_json(written)
    changed = "rare" if "name" in change else "busy"  # which shares the device of the other one of its name
    place = next(place for place, model in enumerate(plan["models"]) if model["name"] == changed)
    plan["models"][place] |= change
    (tmp_path / "odd.json").write_text(document.dumps(plan))
    assert main(["simulate", "--plan", str(tmp_path / "odd.json")]) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err and printed.err.count("\n") == 1 and not printed.out


def test_an_order_takes_the_place_of_the_methods(written, tmp_path, capsys):
    """Two of the plan's models share devices, and the third is alone."""
    trace = tmp_path / "trace.csv"
    rows = [(name, 50, 5 + 90 * (i % 2), i / 2000) for i in range(700) for name in ("busy", "idle", "rare")]
    trace.write_text("model,input,output,arrival\n" + "".join(f"{','.join(map(str, row))}\n" for row in rows))
    mean_s = {}
    for order in ([], ["fcfs"], ["learned", "--ranker-tau", "0.8"], ["sjf"]):
        typed = ["--order", *order] if order else []
        assert main(["simulate", "--plan", str(written), "--replay", str(trace), "--json", *typed]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert [model["requests"] for model in facts["models"]] == [700] * 3
        mean_s[order[0] if order else None] = [model["latency"]["mean"] for model in facts["models"]]
        notes = [text for text in facts["assumptions"] if text.startswith("order: ")]
        assert len(notes) == len(order[:1]) and ("Kendall's tau is 0.8" in " ".join(notes)) == ("learned" in order)
    assert max(sum(mean_s["sjf"]), sum(mean_s["learned"])) < 0.9 * sum(mean_s["fcfs"])
    for typed, words in (
        (["--order", "vtc"], "--order vtc does not order the requests of a plan here"),
        (["--ranker-tau", "0.6"], "is only for --order learned"),
        (["--order", "learned", "--ranker-tau", "2"], "must be above 0 and at most 1"),
        (["--starvation-guard"], "--starvation-guard cannot be combined with --plan"),
    ):
        assert main(["simulate", "--plan", str(written), *typed]) == 2
        assert words in capsys.readouterr().err
