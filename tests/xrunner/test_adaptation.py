"""Another schedule while running: nobody is lost or begins again, and the tokens are those of an undisturbed run."""

import json
from dataclasses import replace

import pytest

from exegpt.document import to_dict
from exegpt.model import ModelSpec
from exegpt.models import load_model
from exegpt.workload import Workload
from xrunner import adaptation, drift
from xrunner.adaptation import same, takes_over_in_place
from xrunner.changes import run_adapting
from xrunner.engine import Engine
from xrunner.ranks import Ranks

from .at_once import AtOnce
from .cells import apart, requests, schedule

WINDOW = 12  # the limit's distance is then 0.64
LENGTHS = [(16, 8)] * 12 + [(5 + i % 7, 16 + i % 5) for i in range(40)]


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(drift, "WINDOW", WINDOW)
    monkeypatch.setattr(adaptation, "ThreadPoolExecutor", AtOnce)


@pytest.fixture(scope="module")
def model(directories):
    return load_model(directories["llama"])


@pytest.fixture(scope="module")
def undisturbed(model):
    found = Engine(model, schedule(model.spec)).run(requests(LENGTHS)).results
    return {result.id: result.output_ids for result in found}


def tokens(report):
    ids = [result.id for result in report.results]
    assert len(ids) == len(set(ids)) == len(LENGTHS)
    return {result.id: result.output_ids for result in report.results}


def test_a_schedule_takes_over_between_two_iterations(model, undisturbed):
    seen = []

    def reschedule(workload):
        seen.append(workload)
        return schedule(model.spec, encode_batch=5, decode_iterations=7)

    report = Engine(model, schedule(model.spec)).run(requests(LENGTHS), reschedule=reschedule)
    assert tokens(report) == undisturbed
    (change,) = report.changes
    assert not change.moved and change.pause_s == 0
    assert change.drifted_s <= change.found_s == change.changed_s
    assert seen[0].output.mean > 12
    assert max(span.sequences for span in report.timeline.spans if span.phase == "encode") == 5
    assert not report.left


def test_where_lengths_stay_nothing_is_searched(model):
    report = Engine(model, schedule(model.spec)).run(requests([(16, 8)] * 40), reschedule=lambda _: 1 / 0)
    assert not report.changes


def test_a_search_that_finds_nothing_better_changes_nothing(model, undisturbed):
    for found in (None, schedule(model.spec, workload=Workload.fixed(7, 18))):
        report = Engine(model, schedule(model.spec)).run(requests(LENGTHS), reschedule=lambda _, found=found: found)
        assert tokens(report) == undisturbed
        assert not report.changes


def test_another_engine_goes_on_with_those_who_waited(directories, model, undisturbed):
    new = schedule(model.spec, "orca", kv_blocks=60)
    engine = Engine.load(directories["llama"], schedule(model.spec), Ranks())
    told = []
    engine, report = run_adapting(engine, directories["llama"], requests(LENGTHS), lambda _: new, told.append)
    assert tokens(report) == undisturbed
    assert [result.id for result in told] == [result.id for result in report.results]
    (change,) = report.changes
    assert change.moved and change.pause_s > 0
    assert engine.schedule == new
    before = [s for s in report.served if s.start_s < change.changed_s]
    assert before and len(before) < len(LENGTHS)
    assert max(s.finish_s for s in before) <= change.changed_s - change.pause_s + 1e-9
    assert sorted(s.index for s in report.served) == list(range(len(LENGTHS)))


def test_layers_move_between_ranks(job, tmp_path, directories, undisturbed):
    spec = ModelSpec.from_directory(directories["llama"])
    pipeline, split = schedule(spec, degrees=(1, 1)), apart(spec, (1,), (1,))
    for old, new in ((pipeline, split), (split, pipeline)):
        asked = {
            "model": str(directories["llama"]),
            "window": WINDOW,
            "schedules": [to_dict(old), to_dict(new)],
            "requests": [to_dict(one) for one in requests(LENGTHS)],
        }
        (tmp_path / "asked.json").write_text(json.dumps(asked))
        done = job(2, "-m", "mpi4py", "-m", "tests.xrunner.adapting", tmp_path)
        assert done.returncode == 0, done.stderr
        found = json.loads((tmp_path / "done.json").read_text())
        assert {r["id"]: tuple(r["output_ids"]) for r in found["results"]} == undisturbed
        assert len(found["results"]) == len(LENGTHS)
        (change,) = found["changes"]
        assert change["moved"] and change["pause_s"] > 0
        assert not [s for s in found["spans"] if s[2] < change["changed_s"] < s[3]]
        assert sorted(index for index, *_ in found["served"]) == list(range(len(LENGTHS)))


def test_what_takes_over_in_place(directories):
    spec = ModelSpec.from_directory(directories["llama"])
    one = schedule(spec)
    assert takes_over_in_place(schedule(spec, encode_batch=9), one)
    assert not takes_over_in_place(schedule(spec, "orca"), one)
    assert not takes_over_in_place(schedule(spec, degrees=(1, 1)), one)
    split = apart(spec, (1,), (1,))
    assert takes_over_in_place(replace(split, encode_batch=2, micro_batches=2), split)
    assert not takes_over_in_place(replace(split, encode_batch=4), split)  # its encoding ranks hold three
    assert same(one, replace(one, workload=Workload.fixed(3, 3)))
    assert not same(one, replace(one, decode_iterations=5))
