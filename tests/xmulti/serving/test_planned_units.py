"""A plan's engines, and the plans and options that a server refuses."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.exegpt.cli.conftest import run_command
from tests.xserver.conftest import schedule_for
from tests.xserver.test_plan import ESTIMATE
from xcore import document
from xcore.console import output
from xcore.console.output import NOTES_OF
from xcore.errors import InputError
from xcore.requests.request import Request
from xcore.specs.cluster_plan import Plan, PlannedModel, Share
from xcore.specs.schedule import Stage
from xmulti.serving.planned_units import NodesInUse, in_places, planned_units, read_plan
from xrunner.models.create import create_model
from xserver.engines.engine_link import EngineLink
from xserver.engines.engine_unit import with_room_for
from xserver.engines.unit_options import PROMISES


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """With the directories `one` and `other`, of different shapes."""
    made = tmp_path_factory.mktemp("planned")
    (made / "one").symlink_to(tiny)
    create_model(made / "other", "opt", layers=1, hidden=32, heads=2, ffn=48, vocab=290, context=64, seed=0)
    return made


def planned(folder, name, devices, directory="one", **fields):
    schedule = schedule_for(folder / directory)
    if len(devices) == 2:
        stages = (Stage((0,), 1, "both", None, (0, 1)), Stage((1,), 1, "both", None, (1, 2)))
        schedule = replace(schedule, stages=stages, cluster=replace(schedule.cluster, devices_per_node=2))
    at = {"directory": str(folder / directory)} | fields
    return PlannedModel(name, devices, schedule, ESTIMATE, **at)


def written(folder, *models, nodes=1, kind="cpu"):
    """A plan's file."""
    cluster = models[0].schedule.cluster
    cluster = replace(cluster, nodes=nodes, devices_per_node=8, device=replace(cluster.device, kind=kind))
    path = folder / "plan.json"
    document.write(path, Plan(Plan.VERSION, "exegpt", cluster, models))
    return path


def empty(folder):
    """The file of a plan without models."""
    path = written(folder, planned(folder, "a", (0,)))
    document.write(path, replace(document.read(Plan, path), models=()))
    return path


def test_a_unit_has_an_engine_with_its_devices(folder, monkeypatch):
    share = Share("space")
    models = [
        planned(folder, "a", (2, 0)),
        planned(folder, "b", (3,), share=share),
        planned(folder, "c", (1,)),
        planned(folder, "d", (3,), "other", share=share),
    ]
    plan = read_plan(written(folder, *models, kind="A40"), {})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    alone, shared, single = planned_units(plan, ["--dtype", "fp32"], 3)
    assert [(model.name, model.place) for model in shared.models] == [("b", 1), ("d", 3)]
    assert alone.arguments == ("--model", str(folder / "one"), "--dtype", "fp32", "--threads", "3")
    assert shared.arguments == ("--unit", "1", "--dtype", "fp32", "--threads", "3")
    assert dict(alone.documents) == {"--schedule": models[0].schedule} and dict(shared.documents) == {"--plan": plan}
    assert [unit.ranks for unit in (alone, shared, single)] == [2, 1, 1]
    seen = [unit.environment["CUDA_VISIBLE_DEVICES"] for unit in (alone, shared, single)]
    assert seen == ["2,0", "3", "1"]
    assert [unit.environment[NOTES_OF] for unit in (alone, shared, single)] == ["a", "b, d", "c"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,GPU-7")  # numbers count among those that this process sees
    assert [unit.environment["CUDA_VISIBLE_DEVICES"] for unit in planned_units(plan, [], 1)] == ["6,4", "GPU-7", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(InputError, match="uses device 2, but CUDA_VISIBLE_DEVICES=4,5 shows only 2"):
        planned_units(plan, [], 1)


def test_each_replica_has_an_engine_and_a_place(folder, tmp_path):
    share = Share("time")
    models = [
        planned(folder, "a", (0,)),
        planned(folder, "a", (1,), share=share),
        planned(folder, "b", (1,), share=share),
    ]
    alone, shared = planned_units(read_plan(written(folder, *models), {}), [], 1)
    assert [[(model.name, model.place) for model in unit.models] for unit in (alone, shared)] == [
        [("a", 0)],
        [("a", 1), ("b", 2)],
    ]
    links = {1: EngineLink(), 2: EngineLink()}
    links[1].add(Request("r", (1,) * 60, 60))
    (plan,) = shared.documents.values()
    small = replace(plan, models=tuple(replace(m, schedule=replace(m.schedule, kv_blocks=2)) for m in plan.models))
    blocks = [model.schedule.kv_blocks for model in with_room_for(links, small).models]
    assert blocks[0] == blocks[2] == 2 < blocks[1], "the other replica has its own requests"


@pytest.mark.parametrize(
    ("by", "bound_s", "promises", "kept"),
    [
        ("time", 5.0, True, True),
        ("time", 5.0, False, False),
        ("time", None, True, False),
        ("priority", 5.0, True, False),
    ],
)
def test_engines_of_a_server_keep_bounds_where_models_take_turns(folder, by, bound_s, promises, kept):
    """Not those of a run; on other nodes too."""
    models = [planned(folder, name, (8,), share=Share(by)) for name in "ab"]
    models = [replace(m, schedule=replace(m.schedule, latency_bound_s=bound_s)) for m in models]
    path, nodes = written(folder, planned(folder, "c", (0,)), *models, nodes=2), NodesInUse(0, (1,))
    for local in (NodesInUse(1, (0,)), nodes):
        units = planned_units(read_plan(path, {}, local), [], 1, local, promises=promises)
        (shared,) = [unit for unit in units if len(unit.models) == 2]
        (alone,) = [unit for unit in units if len(unit.models) == 1]
        assert (PROMISES in shared.arguments) is kept and (shared.admissions is not None) is kept
        assert PROMISES not in alone.arguments and alone.admissions is None


def test_replicas_that_stay_keep_their_places(folder):
    """Else a new engine would take the socket of one that goes on."""

    def plan_of(*places):
        models = [planned(folder, name, (device,)) for name, device in places]
        return document.read(Plan, written(folder, *models))

    current = plan_of(("a", 0), ("b", 1), ("a", 2))
    found = in_places(plan_of(("a", 2), ("a", 1), ("b", 0)), current)
    assert [model.key for model in found.models] == [("a", (1,)), ("b", (0,)), ("a", (2,))]
    assert in_places(current, found) == current
    for other in (plan_of(("a", 0), ("b", 1)), plan_of(("a", 0), ("b", 1), ("a", 2), ("a", 3)), plan_of(("a", 0))):
        with pytest.raises(InputError, match="as many replicas of each model as this server: 2 of 'a', 1 of 'b'"):
            in_places(other, current)


@pytest.mark.parametrize(("cores", "threads"), [(8, 2), (3, 1)])
def test_cpu_devices_share_the_cores(folder, monkeypatch, cores, threads):
    plan = read_plan(written(folder, planned(folder, "a", (0, 1)), planned(folder, "b", (3,))), {})
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    for unit in planned_units(plan, [], None):
        assert unit.arguments[-2:] == ("--threads", str(threads)) and "CUDA_VISIBLE_DEVICES" not in unit.environment


def test_notes_of_an_engine_name_its_models(monkeypatch, capsys):
    monkeypatch.setenv(NOTES_OF, "a, b")
    output.note("the reason")
    assert capsys.readouterr().err == "a, b: the reason\n"


def test_a_given_directory_goes_before_the_plans(folder, tmp_path):
    path = written(folder, planned(folder, "a", (0,), directory="one"))
    (tmp_path / "moved").symlink_to(folder / "one")
    assert read_plan(path, {"a": str(tmp_path / "moved")}).models[0].directory == str(tmp_path / "moved")


def refused(*arguments) -> str:
    """The sentence with which the server doesn't start."""
    done = run_command("serve", *arguments)
    (line,) = done.err.strip().splitlines()
    assert done.code == 2 and done.out == "" and line.startswith("exegpt: ") and line.endswith(".")
    return line


def test_what_is_no_plan_is_refused(folder):
    schedule = folder / "schedule.json"
    document.write(schedule, schedule_for(folder / "one"))
    assert "no file 'gone.json'" in refused("--plan", "gone.json")
    assert "is a schedule, not a plan: name the file of a plan." in refused("--plan", schedule)
    (folder / "torn.json").write_text('{"version": 1')
    assert "is not valid JSON" in refused("--plan", folder / "torn.json")
    several = written(folder, planned(folder, "a", (0,)), nodes=2)
    assert "is for 2 nodes, and --node does not name node 0, which has a: start `exegpt launch` there" in refused(
        "--plan", several
    )
    assert "has no models: it needs at least one" in refused("--plan", empty(folder))
    twice = written(folder, planned(folder, "a", (0,)), planned(folder, "a", (1,)))
    assert "--resident 1 needs one engine for each model, but 'a' has several" in refused(
        "--plan", twice, "--resident", 1
    )
    share = Share("space")
    wide = written(folder, planned(folder, "a", (0, 1), share=share), planned(folder, "b", (0, 1), share=share))
    assert "'a' shares its devices but has a schedule of several stages" in refused("--plan", wide)
    fewer = written(folder, replace(planned(folder, "a", (0, 1)), devices=(0,)))
    assert "'a' has 1 device, but a schedule for 2: run `exegpt plan` again" in refused("--plan", fewer)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--model one", "--model one names no model of the plan: with --plan, pass --model NAME=DIR."),
        ("--model z=one", "--model z=… names no model of 'plan.json': it has a, b."),
        ("--schedule s.json", "The plan determines --schedule: leave it or --plan out"),
        ("--latency-bound 5s", "The plan determines --latency-bound: leave it or --plan out"),
        ("--ranks 2", "The plan determines --ranks: leave it or --plan out"),
        ("--served-model-name x", "The plan determines --served-model-name: leave it or --plan out"),
        ("--order sjf", "--order sjf does not order the requests of a plan here: use one of fcfs, learned"),
        ("--order learned --model b=one", "--order learned needs a ranker for each model, but 'a' has none"),
        ("--ranker a=a.npz --model b=one", "--ranker a=a.npz is only for --order learned: leave it out"),
        ("--best-effort", "The plan determines --best-effort: leave it or --plan out"),
        ("", "does not name the directory of model 'b': add it to the plan, or pass --model b=DIR."),
        (
            "--model b=gone",
            "Model 'b' needs the directory 'gone', which does not exist: add it to the plan, or pass --model b=DIR.",
        ),
        ("--model b=other", "'other' has model 'other' ("),
        ("--model b=one --warm-models epwq", "--warm-models epwq needs --resident"),
        ("--model b=one --resident 1 --warm-models prewarm", "--warm-models prewarm needs --graphs FILE"),
        ("--model b=one --resident 1 --knob 0.3", "--knob 0.3 is only for --warm-models prewarm, but it is lru"),
        ("--model b=one --resident 1 --graphs g.json", "--graphs g.json is only for --warm-models prewarm"),
        ("--model b=one --graphs g.json", "The plan determines --graphs: leave it or --plan out"),
    ],
)
def test_options_that_do_not_fit_a_plan_are_refused(folder, monkeypatch, words, sentence):
    monkeypatch.chdir(folder)
    written(folder, planned(folder, "a", (0,)), planned(folder, "b", (1,)))
    path = Path("plan.json")
    plan = document.read(Plan, path)
    document.write(path, replace(plan, models=(plan.models[0], replace(plan.models[1], directory=None))))
    assert sentence in refused("--plan", path, *words.split())


def test_a_server_of_one_model_needs_one_directory():
    assert "has one model, but --model is given 0 times" in refused()
    assert "has one model, but --model is given 2 times" in refused("-m", "a", "-m", "b")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("-m one --replan-after 1m", "--replan-after needs a plan"),
        ("--plan plan.json --replan-after 5", "'5' is not a"),
    ],
)
def test_how_long_popularity_must_have_drifted(folder, monkeypatch, words, sentence):
    monkeypatch.chdir(folder)
    written(folder, planned(folder, "a", (0,)), planned(folder, "b", (1,)))
    assert sentence in refused(*words.split())
