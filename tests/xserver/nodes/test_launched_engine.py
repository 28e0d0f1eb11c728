"""The processes that a launcher starts: only `exegpt engine`, with arguments that the launcher makes or checks."""

from dataclasses import replace

import pytest

from tests.stored_profile import store_profile
from tests.xmulti.serving.test_planned_units import planned, written
from tests.xserver.conftest import schedule_for
from xcore import document
from xcore.console.output import NOTES_OF
from xcore.errors import InputError
from xcore.specs.cluster_plan import Plan, Share
from xmulti.serving.planned_units import NodesInUse, planned_units, read_plan
from xrunner.models.create import create_model
from xserver.engines.unit_options import NodePlace
from xserver.nodes.launch_protocol import LaunchedModel, StartEngine
from xserver.nodes.launched_engine import engine_to_launch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two models of different sizes."""
    folder = tmp_path_factory.mktemp("launched")
    sizes = {"hidden": 32, "heads": 2, "kv_heads": 2, "ffn": 64, "vocab": 300, "context": 128}
    for name, layers in (("one", 2), ("other", 3)):
        create_model(folder / name, "llama", layers=layers, **sizes, seed=0)
        store_profile(folder / name)
    return folder


@pytest.fixture
def alone(folder):
    """An engine of `one` on the node's device 1."""
    models = (LaunchedModel("a", 4, str(folder / "one")),)
    schedule = document.to_dict(schedule_for(folder / "one"))
    return StartEngine(0, models, (1,), 2, ("--dtype", "fp32", "--pinned", "--promises"), schedule, None, 0)


@pytest.fixture
def shared(folder):
    """An engine of `one` and `other`, which share the node's device 1: the third and the first of the plan."""
    share = Share("time")
    models = [
        planned(folder, "b", (9,), "other", share=share),
        planned(folder, "c", (0,)),
        planned(folder, "a", (9,), share=share),
    ]
    plan = document.read(Plan, written(folder, *models, nodes=2))
    asked = (LaunchedModel("b", 0, str(folder / "other")), LaunchedModel("a", 2, str(folder / "one")))
    return StartEngine(0, asked, (1,), 1, (), None, document.to_dict(plan), 0)


def test_an_engine_alone_gets_the_launchers_paths(alone, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)))
    launch = engine_to_launch(alone, {}, tmp_path)
    socket = ("--socket", str(tmp_path / "engine-4"))
    assert launch.arguments == (
        *("--model", str(folder / "one"), *socket),
        *("--dtype", "fp32", "--pinned", "--promises", "--threads", "3"),
    )
    assert launch.documents == {"--schedule": schedule_for(folder / "one")}
    assert launch.environment == {NOTES_OF: "a"}
    typed = engine_to_launch(replace(alone, flags=("--threads", "5")), {"a": folder / "one", "b": folder}, tmp_path)
    assert typed.arguments == ("--model", str(folder / "one"), *socket, "--threads", "5")


def test_engines_that_share_get_the_plan_with_this_nodes_directories(shared, folder, tmp_path):
    elsewhere = replace(shared, models=tuple(replace(model, directory="/elsewhere") for model in shared.models))
    launch = engine_to_launch(elsewhere, {"a": folder / "one", "b": folder / "other"}, tmp_path)
    assert launch.arguments[:4] == ("--unit", "0", "--socket", str(tmp_path))
    (plan,) = launch.documents.values()
    assert [model.directory for model in plan.models] == [str(folder / "other"), None, str(folder / "one")]
    assert launch.environment == {NOTES_OF: "b, a"}


def test_a_gpu_is_one_that_the_launcher_sees(alone, folder, tmp_path, monkeypatch):
    schedule = schedule_for(folder / "one")
    gpu = replace(schedule.cluster, device=replace(schedule.cluster.device, kind="A40"))
    alone = replace(alone, schedule=document.to_dict(replace(schedule, cluster=gpu)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert engine_to_launch(alone, {}, tmp_path).environment["CUDA_VISIBLE_DEVICES"] == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert engine_to_launch(alone, {}, tmp_path).environment["CUDA_VISIBLE_DEVICES"] == "7"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    with pytest.raises(InputError, match="uses device 1, but CUDA_VISIBLE_DEVICES=4 shows only 1"):
        engine_to_launch(alone, {}, tmp_path)


@pytest.mark.parametrize(
    "flags",
    [
        ("--socket", "/tmp/other"),
        ("--model", "/etc"),
        ("--schedule", "/etc/passwd"),
        ("--plan", "x"),
        ("--plugin", "x.py"),
        ("--report-speed",),
        ("--device", "cpu; true"),
        ("--device", "../x"),
        ("--device",),
        ("--threads", "-1"),
        ("--threads", "99999"),
        ("--dtype", "--plugin"),
        ("--dtype", "fp32\n"),
        ("--pinned", "--socket"),
        ("true",),
        ("",),
    ],
    ids=str,
)
def test_no_other_argument_reaches_an_engine(alone, tmp_path, flags):
    with pytest.raises(InputError, match="A launcher starts no engine with the argument"):
        engine_to_launch(replace(alone, flags=flags), {}, tmp_path)


def test_what_no_engine_can_run_is_refused(alone, shared, folder, tmp_path):
    (a,) = alone.models
    refused = {
        "needs 1 to 64 different devices": [{"devices": devices} for devices in ((), (0, 0), (-1,), tuple(range(65)))],
        "has 1 to 100 models": [{"models": ()}, {"models": (a,) * 101}],
        "is no name of a model": [{"models": (replace(a, name=name),)} for name in ("", "a\nb", "x" * 201)],
        "either a schedule or a plan": [{"schedule": None}, {"plan": shared.plan}],
        "The schedule is for 1 device, but the engine has 2": [{"devices": (0, 1)}],
        "The schedule is for 1 device": [{"models": (a, replace(a, place=5))}],
        "The schedule: .*version is missing": [{"schedule": {}}],
        "Model 'a' needs the directory '/gone', which does not exist there: start its launcher with --model a=DIR": [
            {"models": (replace(a, directory="/gone"),)}
        ],
        "but model 'a' of the plan is": [{"models": (replace(a, directory=str(folder / "other")),)}],
    }
    for why, changes in refused.items():
        for change in changes:
            with pytest.raises(InputError, match=why):
                engine_to_launch(replace(alone, **change), {}, tmp_path)
    others = {
        "has 2 units, but no unit 2": {"unit": 2},
        "has 2 units, but no unit -1": {"unit": -1},
        "Unit 1 of the plan has other models": {"unit": 1},
        "Unit 0 of the plan has other models": {"models": shared.models[:1]},
        "The plan: ": {"plan": {"version": 1}},
    }
    for why, change in others.items():
        with pytest.raises(InputError, match=why):
            engine_to_launch(replace(shared, **change), {}, tmp_path)


def test_a_plan_of_two_nodes_has_units_on_both(folder, monkeypatch):
    """Each node numbers its devices from 0, and divides its threads among them."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)))
    share = Share("time")
    models = [
        planned(folder, "a", (3,)),
        planned(folder, "a", (8,)),
        planned(folder, "a", (15,), share=share),
        planned(folder, "b", (15,), "other", share=share),
    ]
    path = written(folder, *models, nodes=2)
    nodes = NodesInUse(0, (1,))
    plan = read_plan(path, {}, nodes)
    local, alone, together = planned_units(plan, ["--dtype", "fp32"], None, nodes)
    assert local.at is None and local.arguments[-2:] == ("--threads", "12")
    assert (alone.at, together.at) == (NodePlace(1, (0,), 2, 1), NodePlace(1, (7,), 2, 2))
    assert alone.arguments == together.arguments == ("--dtype", "fp32")
    assert alone.documents == {"--schedule": models[1].schedule} and together.documents == {"--plan": plan}
    assert planned_units(plan, [], 2, nodes)[1].arguments == ("--threads", "2")
    launched = planned_units(plan, [], None, NodesInUse(None, (0, 1)))[0]
    assert launched.at == NodePlace(0, (3,), 1, 0)
    for known, missing in ((NodesInUse(0), 1), (NodesInUse(None, (1,)), 0), (NodesInUse(named=False), 0)):
        with pytest.raises(InputError, match=f"--node does not name node {missing}, which has a"):
            read_plan(path, {}, known)
    with pytest.raises(InputError, match="is for 2 nodes, which only `exegpt serve --plan` can run"):
        read_plan(path, {})
    spanning = written(folder, planned(folder, "a", (7, 8)), nodes=2)
    with pytest.raises(InputError, match="has model a on nodes 0, 1, but a server runs each engine on one node"):
        read_plan(spanning, {}, nodes)
