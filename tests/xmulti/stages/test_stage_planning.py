"""Plans of stages from files: what a file asks for, what the command prints, and what is refused in one sentence."""

import json
from dataclasses import replace

import pytest

from tests.exegpt.cli.conftest import run_command
from xcore import document
from xcore.errors import InputError
from xcore.specs.cost_table import CostTable
from xcore.specs.workload import LengthDistribution
from xmulti.files.application_file import CPU_START_S, read_application
from xmulti.files.stage_plan import StagePlan
from xmulti.stages.stage_planning import propose_stages

CHAIN = {"name": "chain", "model": "llama-2-13b", "workload": "1024/200", "requests": 20, "rounds": 3, "load": "20s"}
JUDGE = {"name": "judge", "model": "llama-2-70b", "workload": "100/50", "times": 2}
CHAT = {"name": "chat", "model": "llama-2-7b", "workload": "64/64", "requests": 300, "load": "10s"}
EDGES = [{"source": "chain", "target": "chain"}, {"source": "chain", "target": "judge", "kind": "final"}]
CLUSTER = "4xA100-80GB"


def write(path, **content):
    file = path / "application.yaml"
    file.write_text(json.dumps(content))  # JSON is YAML
    return file


@pytest.fixture
def file(tmp_path):
    return write(tmp_path, nodes=[CHAIN, JUDGE, CHAT], edges=EDGES, linked=2)


def test_what_a_file_asks_for(file):
    asked = read_application(file, CLUSTER)
    chain, judge, chat = asked.graph.nodes
    assert chain.prompts == (1024,) * 20 and chain.rounds == (3,) * 20
    assert (judge.prompts, judge.prompt, judge.times) == ((), 100, 2)
    assert len(chat.prompts) == 300 and asked.linked == 2
    degrees = {model.name: {d.tp: d.load_s for d in model.degrees} for model in asked.table.models}
    assert degrees["chain"] == {1: 20.0, 2: 20.0}
    assert degrees["judge"] == {2: pytest.approx(69e9 * 2 / 0.87e9 / 2, rel=0.01)}, "70B don't fit on one"
    assert any(text.startswith("judge: loading: a GPU's weights at 0.87 GB/s") for text in asked.assumptions)


def test_loading_times_depend_on_the_degree(tmp_path):
    node = CHAT | {"load": {"1": "10s", "2": "6s"}}
    asked = read_application(write(tmp_path, nodes=[node], edges=[]), CLUSTER)
    loads = {d.tp: d.load_s for d in asked.table.models[0].degrees}
    assert (loads[1], loads[2]) == (10.0, 6.0) and loads[4] == pytest.approx(6.7e9 * 2 / 0.87e9 / 4, rel=0.02)
    with pytest.raises(InputError, match="'soon' is not a duration"):
        read_application(write(tmp_path, nodes=[CHAT | {"load": {"1": "soon"}}], edges=[]), CLUSTER)


def test_an_imported_cost_table_reaches_the_plan(tmp_path):
    """A table with twice the seconds, and loading times and outputs of its own, beside the profile's."""
    file = write(tmp_path, nodes=[{k: v for k, v in CHAT.items() if k != "load"}], edges=[])
    (known,) = read_application(file, CLUSTER).table.models
    outputs = LengthDistribution((10, 90), (0.5, 0.5))
    slower = [replace(d, prefill=_twice(d.prefill), decode=_twice(d.decode), load_s=3.0 * d.tp) for d in known.degrees]
    measured = replace(known, name="llama-2-7b", degrees=tuple(slower[:2]), outputs=outputs)
    document.write(tmp_path / "costs.json", CostTable(CostTable.VERSION, "samullm", "8xA100-80GB", (measured,)))
    profile = ("--profile", f"chat={tmp_path / 'costs.json'}")
    asked = read_application(file, CLUSTER, profile=profile[1:])
    assert asked.table.models == (replace(measured, name="chat"),)
    assert any("a table of samullm, measured on 8xA100-80GB" in text for text in asked.assumptions)
    done = run_command("plan", file, "--cluster", CLUSTER, "--method", "samullm", *profile, "--json")
    degrees = {node["tp"] for stage in done.json["plan"]["stages"] for node in stage["nodes"]}
    assert done.code == 0 and degrees <= {1, 2}
    other = write(tmp_path, nodes=[CHAT | {"model": "llama-2-13b"}], edges=[])
    with pytest.raises(InputError, match="no model 'llama-2-13b': it has llama-2-7b"):
        read_application(other, CLUSTER, profile=profile[1:])
    wide = replace(measured, degrees=(slower[1],))
    document.write(tmp_path / "costs.json", CostTable(CostTable.VERSION, "samullm", "8xA100-80GB", (wide,)))
    with pytest.raises(InputError, match="has TP 2 of 'llama-2-7b', and none divides 1"):
        read_application(write(tmp_path, nodes=[CHAT], edges=[], linked=1), CLUSTER, profile=profile[1:])


def _twice(phase):
    return replace(phase, compute=tuple((2 * slope, 2 * intercept) for slope, intercept in phase.compute))


@pytest.mark.parametrize("method", ["samullm-max", "samullm-min"])
def test_a_heuristics_plan_is_written(file, tmp_path, method):
    done = run_command("plan", file, "--cluster", CLUSTER, "--method", method, "--out", tmp_path / "p.json", "--json")
    assert done.code == 0 and [m["method"] for m in done.json["methods"]][:2] == [method, "samullm"]
    assert document.read(StagePlan, tmp_path / "p.json").method == method


def test_an_engine_on_cpus_takes_its_start_beside_its_weights(tmp_path):
    node = {"name": "a", "model": "gpt2", "workload": "9/5", "requests": 3}
    asked = read_application(write(tmp_path, nodes=[node], edges=[]), "local")
    (degree,) = asked.table.models[0].degrees
    assert degree.load_s == pytest.approx(CPU_START_S + 124.4e6 * 4 / 0.87e9, rel=0.01)
    assert any("loading: 7 s to start an engine, a device's weights at 0.87 GB/s" in text for text in asked.assumptions)


def test_the_search_is_no_later_than_the_heuristics(file):
    ours, greatest, least = propose_stages(read_application(file, CLUSTER))
    assert [p.method for p in (ours, greatest, least)] == ["samullm", "samullm-max", "samullm-min"]
    assert 0 < ours.plan.seconds <= min(greatest.plan.seconds, least.plan.seconds)


def test_a_plan_is_written_shown_and_printed(file, tmp_path):
    out = tmp_path / "plan.json"
    done = run_command("plan", file, "--cluster", CLUSTER, "--method", "samullm", "--out", out, "--json")
    assert done.code == 0, done.err
    plan = document.read(StagePlan, out)
    assert done.json["plan"] == document.to_dict(plan)
    assert {node.name for stage in plan.stages for node in stage.nodes} == {"chain", "judge", "chat"}
    assert [method["method"] for method in done.json["methods"]] == ["samullm", "samullm-max", "samullm-min"]
    residents = {model.name: {schedule.control.max_num_seqs for schedule in model.schedules} for model in plan.models}
    assert residents == {"chain": {20}, "judge": {40}, "chat": {300}}, "as many calls as there can be at once"
    for model in plan.models:
        degrees = [degree.tp for degree in model.costs.degrees]
        assert [schedule.stages[0].tp for schedule in model.schedules] == degrees
        assert set(degrees) == {n.tp for stage in plan.stages for n in stage.nodes if n.name == model.name}
    shown = run_command("show", out, "--json")
    assert (shown.code, shown.json["kind"], shown.json["stages"]) == (0, "stages", document.to_dict(plan))
    report = tmp_path / "stages.html"
    printed = run_command("plan", file, "--cluster", CLUSTER, "--method", "samullm", "--report", report)
    assert "samullm:" in printed.out and "the Max-heuristic" in printed.err and "judge" in run_command("show", out).out
    assert "       3 │" in printed.out and "       3 │" in run_command("show", out).out, "a picture of the devices"
    assert "<svg" in report.read_text() and "samullm-max" in report.read_text()


def test_a_models_file_of_requests_alone(tmp_path):
    keys = ("name", "model", "workload", "requests")
    models = [{key: node[key] for key in keys} for node in (CHAIN, CHAT)]
    asked = read_application(write(tmp_path, models=models), CLUSTER)
    assert asked.linked == 4 and not asked.graph.edges
    (ours, *_) = propose_stages(asked)
    assert {node.name for stage in ours.plan.stages for node in stage.nodes} == {"chain", "chat"}


@pytest.mark.parametrize(
    ("content", "cluster", "message"),
    [
        ({"nodes": [CHAIN | {"rate": "5/s"}]}, CLUSTER, "nodes.0.rate is not known"),
        ({"nodes": []}, CLUSTER, "has no nodes"),
        ({"nodes": [CHAT]}, "2x4xA100-80GB", "Node 'chat' of .* has 2 nodes, but plans of stages support one"),
        ({"nodes": [CHAT | {"requests": 0}]}, CLUSTER, "'chat' has 0 requests"),
        ({"nodes": [JUDGE | {"rounds": 2}]}, CLUSTER, "'judge' has rounds, so it also needs its own requests"),
        ({"nodes": [CHAT | {"model": "t5-3b"}]}, CLUSTER, "is an encoder-decoder"),
        ({"nodes": [CHAT | {"model": "gpt3-341b"}]}, CLUSTER, "does not fit on 1, 2, 4 of the devices"),
        (
            {"nodes": [CHAT], "edges": [{"source": "chat", "target": "me"}]},
            CLUSTER,
            "'.*application.yaml': Edges name me, but the",
        ),
        (
            {"nodes": [CHAT | {"load": {}}]},
            CLUSTER,
            "'chat' has a load of {}: write a loading time for each number of GPUs",
        ),
        ({"nodes": [CHAT | {"load": {"0": "5s"}}]}, CLUSTER, "has a load of {0: '5s'}: write a loading time for each"),
        ({"nodes": [CHAT | {"load": {"1": 5}}]}, CLUSTER, "nodes.0.load is 5, which has no unit: write 5s"),
        ({"nodes": [CHAT | {"load": {"two": "5s"}}]}, CLUSTER, "nodes.0.load.two must be a whole number"),
        ({"nodes": [CHAT | {"requests": 10**8}]}, CLUSTER, "'chat' has 100,000,000 requests: it must have 1 to"),
        ({"nodes": [CHAIN | {"rounds": -1}]}, CLUSTER, "'chain' has rounds of -1: the number must be at least 1"),
        ({"nodes": [CHAT], "linked": 0}, CLUSTER, "has linked = 0: it must be at least 1 GPU"),
        ({"nodes": [CHAT], "linked": 3}, CLUSTER, "linked in groups of 3"),
        ({"models": [CHAT | {"requests": None, "rate": "5/s", "load": None}]}, CLUSTER, "not known"),
        ({"models": [{k: CHAT[k] for k in ("name", "model", "workload")} | {"rate": "5/s"}]}, CLUSTER, "has a rate"),
    ],
)
def test_what_cannot_be_planned(tmp_path, content, cluster, message):
    with pytest.raises(InputError, match=message):
        propose_stages(read_application(write(tmp_path, **content), cluster))
    done = run_command("plan", tmp_path / "application.yaml", "--cluster", cluster, "--method", "samullm")
    assert done.code == 2 and done.err.count("\n") == 1
