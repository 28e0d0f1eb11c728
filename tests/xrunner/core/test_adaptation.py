"""Another schedule while running: no request is lost or restarted, and the tokens are those of an undisturbed run."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.xcore import small_specs
from tests.xrunner.at_once import at_once
from tests.xrunner.cells import disaggregated, requests, schedule
from xcore import document
from xcore.document import to_dict
from xcore.policies.from_schedule import make_ledger
from xcore.specs.change import takes_over_in_place
from xcore.specs.model import ModelSpec
from xcore.specs.workload import Workload
from xrunner.comm.ranks import Ranks
from xrunner.core import adaptation, drift, driver
from xrunner.core import engine as engine_module
from xrunner.core.adaptation import same
from xrunner.core.changes import run_adapting
from xrunner.core.engine import Engine
from xrunner.core.results import read_results
from xrunner.models import load_model

WINDOW = 12  # the limit's distance is then 0.64
LENGTHS = [(16, 8)] * 12 + [(5 + i % 7, 16 + i % 5) for i in range(40)]


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(drift, "WINDOW", WINDOW)
    monkeypatch.setattr(adaptation, "beside", at_once)


@pytest.fixture(scope="module")
def model(directories):
    return load_model(directories["llama"])


@pytest.fixture(scope="module")
def undisturbed(model):
    results = Engine(model, schedule(model.spec)).run(requests(LENGTHS)).results
    return {result.id: result.output_ids for result in results}


@pytest.fixture(scope="module")
def for_two(model):
    """Requests of two replicas, and their tokens."""
    todo = requests(LENGTHS[:12] + LENGTHS + 3 * LENGTHS[12:])  # one replica may be twice as quick
    return todo, {result.id: result.output_ids for result in Engine(model, schedule(model.spec)).run(todo).results}


def tokens(report):
    ids = [result.id for result in report.results]
    assert len(ids) == len(set(ids)) == len(LENGTHS)
    return {result.id: result.output_ids for result in report.results}


def test_a_schedule_takes_over_between_two_iterations(model, undisturbed):
    seen = []

    def reschedule(workload, held):
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
    report = Engine(model, schedule(model.spec)).run(requests([(16, 8)] * 40), reschedule=lambda *_: 1 / 0)
    assert not report.changes


def test_a_search_that_finds_nothing_better_changes_nothing(model, undisturbed):
    for found in (None, schedule(model.spec, workload=Workload.fixed(7, 18))):
        report = Engine(model, schedule(model.spec)).run(requests(LENGTHS), reschedule=lambda *_, found=found: found)
        assert tokens(report) == undisturbed
        assert not report.changes


def test_other_lengths_take_over_where_they_are_promised(model):
    held, found = schedule(model.spec), []
    for promises in (False, True):
        looking = adaptation.Adaptation(
            held, lambda observed, held: replace(held, workload=observed), promises=promises
        )
        for index in range(2 * WINDOW):
            looking.drift.begin(index)
            looking.drift.end(index, 5, 17)
            found.append((promises, looking.look(float(index))))
    (change,) = [change for promises, change in found if change]
    assert (True, change) in found and same(change.schedule, held) and change.schedule.workload.output.max == 17


def test_a_larger_cache_takes_the_weights_that_are_there(directories, model, undisturbed, monkeypatch):
    new = schedule(model.spec, kv_blocks=60, encode_batch=5)
    first = Engine.load(directories["llama"], schedule(model.spec), Ranks())
    monkeypatch.setattr(engine_module, "load_part", pytest.fail)
    events = []
    engine, report = run_adapting(first, directories["llama"], requests(LENGTHS), lambda *_: new, events.append)
    assert tokens(report) == undisturbed
    assert not {"model", "worker"} & vars(first).keys()  # nothing is kept by who holds it
    assert [result.id for result in events] == [result.id for result in report.results]
    (change,) = report.changes
    assert not change.moved and change.pause_s > 0
    assert engine.schedule == new and len(engine.worker.cache.keys[0]) == 60
    before = [s for s in report.served if s.start_s < change.changed_s]
    assert before and len(before) < len(LENGTHS)
    assert max(s.finish_s for s in before) <= change.changed_s - change.pause_s + 1e-9
    assert sorted(s.index for s in report.served) == list(range(len(LENGTHS)))


def test_the_next_cache_holds_the_longest_waiting_request(directories, model):
    """Though it was found for requests that are all shorter."""
    todo = requests([*LENGTHS, (60, 20)])
    expected = {r.id: r.output_ids for r in Engine(model, schedule(model.spec)).run(todo).results}
    new = schedule(model.spec, "orca", kv_blocks=3)
    engine = Engine.load(directories["llama"], schedule(model.spec), Ranks())
    engine, report = run_adapting(engine, directories["llama"], todo, lambda *_: new)
    assert {r.id: r.output_ids for r in report.results} == expected
    assert report.changes and engine.schedule == replace(new, kv_blocks=5)


@pytest.mark.parametrize(
    ("refused", "why_not"), [({"kv_blocks": 2**36}, "GiB are available"), ({"replicas": 2}, "for 2 devices")]
)
def test_what_the_ranks_cannot_take_leaves_the_schedule_as_it_was(directories, model, undisturbed, refused, why_not):
    engine = Engine.load(directories["llama"], schedule(model.spec), Ranks())
    searches = []

    def reschedule(workload, held):
        searches.append(workload)
        return schedule(model.spec, workload=workload, **refused)

    engine, report = run_adapting(engine, directories["llama"], requests(LENGTHS), reschedule)
    assert tokens(report) == undisturbed
    (change,) = report.changes
    assert why_not in change.refused and not change.moved
    assert engine.schedule == schedule(model.spec, workload=searches[0]) and len(searches) == 1


def test_a_request_cancelled_after_a_move_ends(directories, model, undisturbed):
    """By the engine that the run began with, which is all that the caller has."""
    first = Engine.load(directories["llama"], schedule(model.spec), Ranks())
    events = []

    def hear(result):
        events.append(result)
        if len(events) == 40:
            first.abort("51")

    new = schedule(model.spec, "orca", kv_blocks=60, max_num_seqs=2)
    _, report = run_adapting(first, directories["llama"], requests(LENGTHS), lambda *_: new, hear)
    (change,) = report.changes
    assert events[39].finish_s > change.changed_s
    assert [result.id for result in events if result.finish_reason == "cancelled"] == ["51"]


@pytest.mark.parametrize(("longest", "blocks"), [((5, 16), 10), ((80, 12), 6)])
def test_in_place_a_schedule_has_the_blocks_that_it_reckons_with(model, longest, blocks, monkeypatch):
    """Or more, where a waiting request needs them."""
    ledgers, todo = [], requests([*LENGTHS, longest])
    expected = {r.id: r.output_ids for r in Engine(model, schedule(model.spec)).run(todo).results}

    def remember(*arguments):
        ledgers.append(make_ledger(*arguments))
        return ledgers[-1]

    monkeypatch.setattr(driver, "make_ledger", remember)
    new = schedule(model.spec, encode_batch=6, kv_blocks=10 if longest == (5, 16) else 4)
    report = Engine(model, schedule(model.spec)).run(todo, reschedule=lambda *_: new)
    assert report.changes and {r.id: r.output_ids for r in report.results} == expected
    assert ledgers[0].pool.total == blocks


def test_no_request_waits_for_an_engine_that_is_not_needed(directories, model):
    todo = requests(LENGTHS[:40])
    plan = schedule(model.spec, encode_batch=40, kv_blocks=200)
    engine = Engine.load(directories["llama"], plan, Ranks())
    after, report = run_adapting(engine, directories["llama"], todo, lambda *_: schedule(model.spec, "orca"))
    assert after is engine and not report.changes and len(report.results) == len(todo)


def changed(job, folder, directory, ranks, old, new, todo):
    """What came of a job whose lengths drift."""
    options = {
        "model": str(directory),
        "window": WINDOW,
        "schedules": [to_dict(old), to_dict(new)],
        "requests": [to_dict(request) for request in todo],
    }
    (folder / "asked.json").write_text(json.dumps(options))
    done = job(ranks, "-m", "mpi4py", "-m", "tests.xrunner.adapting", folder)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "done.json").read_text())


@pytest.mark.slow
def test_layers_move_between_ranks(job, tmp_path, directories, undisturbed):
    spec = ModelSpec.from_directory(directories["llama"])
    pipeline, split = schedule(spec, degrees=(1, 1)), disaggregated(spec, (1,), (1,))
    for old, new in ((pipeline, split), (split, pipeline)):
        facts = changed(job, tmp_path, directories["llama"], 2, old, new, requests(LENGTHS))
        check_a_move(facts, undisturbed, 2)


@pytest.mark.slow
def test_layers_move_in_all_replicas(job, tmp_path, directories, for_two):
    spec, (todo, expected) = ModelSpec.from_directory(directories["llama"]), for_two
    split, pipeline = disaggregated(spec, (1,), (1,), replicas=2), schedule(spec, degrees=(1, 1), replicas=2)
    check_a_move(changed(job, tmp_path, directories["llama"], 4, split, pipeline, todo), expected, 4)


def check_a_move(facts, expected, ranks):
    """Every request has its tokens, once, and no rank computes while layers move."""
    assert {r["id"]: tuple(r["output_ids"]) for r in facts["results"]} == expected
    assert len(facts["results"]) == len(expected)
    (change,) = facts["changes"]
    assert change["moved"] and change["pause_s"] > 0
    assert not [s for s in facts["spans"] if s[2] < change["changed_s"] < s[3]]
    assert {s[0] for s in facts["spans"] if s[2] >= change["changed_s"]} == set(range(ranks))
    assert sorted(index for index, *_ in facts["served"]) == list(range(len(expected)))


@pytest.mark.slow
def test_replicas_change_together(job, tmp_path, directories, for_two):
    spec, (todo, expected) = ModelSpec.from_directory(directories["llama"]), for_two
    old, new = (schedule(spec, encode_batch=count, replicas=2) for count in (3, 5))
    facts = changed(job, tmp_path, directories["llama"], 2, old, new, todo)
    assert {r["id"]: tuple(r["output_ids"]) for r in facts["results"]} == expected
    (change,) = facts["changes"]
    assert not change["moved"] and facts["searches"][1] == 0  # one search for both
    for device in (0, 1):
        encoded = [s for s in facts["spans"] if s[0] == device and s[1] == "encode"]
        assert max(count for *_, start, _, count in encoded if start < change["changed_s"]) == 3
        assert max(count for *_, start, _, count in encoded if start > change["changed_s"]) == 5


@pytest.mark.slow
def test_the_command_writes_one_file_whichever_rank_leads(job, tmp_path, directories, undisturbed):
    """In a pipeline the first rank leads, disaggregated the last."""
    spec = ModelSpec.from_directory(directories["llama"])
    for name, plan in (("one", schedule(spec, degrees=(1, 1))), ("two", disaggregated(spec, (1,), (1,)))):
        document.write(tmp_path / f"{name}.json", plan)
    lines = [{"id": r.id, "prompt_ids": list(r.prompt_ids), "max_tokens": r.max_tokens} for r in requests(LENGTHS)]
    lines = [json.dumps(line | {"ignore_eos": True}) + "\n" for line in lines]
    (tmp_path / "r.jsonl").write_text("".join([*lines, '{"id": "bad"}\n']))
    files = ["--schedule", tmp_path / "one.json", "--requests", tmp_path / "r.jsonl", "--out", tmp_path / "out.jsonl"]
    command = ["run", "--model", directories["llama"], *files, "--profile", "roofline", "--skip-invalid", "--adapt"]
    done = job(2, "-m", "tests.xrunner.drifting", *command, NEXT=str(tmp_path / "two.json"))
    assert done.returncode == 0, done.stderr
    results = {result.id: result for result in read_results(tmp_path / "out.jsonl")}
    assert results.pop("bad").finish_reason == "error"
    assert {name: result.output_ids for name, result in results.items()} == undisturbed
    assert not list(tmp_path.glob("out.jsonl.*")) and "layers moved" in done.stdout
    assert f"{len(LENGTHS)} requests, " in done.stdout


def test_a_search_that_goes_on_keeps_no_process_alive():
    """Its result would have no reader."""
    code = "import time; from xrunner.core.adaptation import beside; beside(lambda: time.sleep(600)); time.sleep(0.1)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_what_takes_over_in_place(directories):
    spec = ModelSpec.from_directory(directories["llama"])
    plan = schedule(spec)
    assert takes_over_in_place(schedule(spec, encode_batch=9), plan)
    assert takes_over_in_place(schedule(spec, kv_blocks=39), plan)
    assert not takes_over_in_place(schedule(spec, kv_blocks=41), plan)
    assert not takes_over_in_place(schedule(spec, "orca"), plan)
    assert not takes_over_in_place(schedule(spec, degrees=(1, 1)), plan)
    assert not takes_over_in_place(replace(plan, block_size=2 * plan.block_size), plan)  # as many, twice as large
    assert not takes_over_in_place(replace(plan, kv_dtype="bf16"), plan)
    split = disaggregated(spec, (1,), (1,))
    assert takes_over_in_place(small_specs.changed(split, encode_batch=2, micro_batches=2), split)
    assert not takes_over_in_place(small_specs.changed(split, encode_batch=4), split)  # its encoding ranks hold three
    assert same(plan, replace(plan, workload=Workload.fixed(3, 3)))
    assert not same(plan, small_specs.changed(plan, decode_iterations=5))
