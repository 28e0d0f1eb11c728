"""Searching again while a run goes on: what is promised is what the ranks can run, and moving must be worth it."""

import subprocess
import sys
from dataclasses import replace

import pytest

from exegpt.cli import rescheduling
from exegpt.cli.answer import search_schedule
from exegpt.cli.inputs import find_setting
from exegpt.cli.rescheduling import WORTH, Asked, best, in_a_process
from exegpt.policies import TRAITS
from exegpt.workload import Workload, task
from xrunner.core.adaptation import takes_over_in_place
from xsimulator import estimate


@pytest.fixture(scope="module")
def setting():
    return find_setting("opt-13b", "4xA40", "S", None)


@pytest.fixture(scope="module")
def pipeline(setting):
    """RRA on four stages."""
    fixed = {"replicas": 1, "tp_degree": 1}
    return search_schedule(setting, 30.0, policies=("rra",), fixed=fixed).schedule


def rate(schedule, setting):
    return estimate(schedule, setting.profile).throughput_tok_s


def test_what_is_as_good_in_place_stays(setting, pipeline):
    found, _ = best(replace(setting, workload=task("C1")), pipeline)
    assert takes_over_in_place(found, pipeline) and found.kv_blocks <= pipeline.kv_blocks


@pytest.mark.parametrize("blocks", [2000, 4000, 8000])
def test_a_larger_cache_must_be_worth_it(setting, pipeline, blocks):
    there = replace(setting, workload=task("C1"))
    held = replace(pipeline, kv_blocks=blocks)
    asked = {"policies": ("rra",), "fixed": {"replicas": 1}, "bound": held.bound}
    free = search_schedule(there, 30.0, **asked).schedule
    found, _ = best(there, held)
    within = search_schedule(there, 30.0, **asked | {"fixed": {"replicas": 1, "tp_degree": 1}}, kv_blocks=blocks)
    worth = rate(within.schedule, setting) < (1 - WORTH) * rate(free, setting)
    assert takes_over_in_place(found, held) == (not worth)
    assert found == (free if worth else within.schedule)


def test_other_layers_where_those_that_are_there_are_too_slow(setting, pipeline):
    """No variables that were found for other stages."""
    found, _ = best(replace(setting, workload=task("G")), pipeline)
    assert found.stages != pipeline.stages
    said = estimate(found, setting.profile)
    assert said.latency_s <= 30 and said.feasible


def test_sides_that_fill_their_memory_with_more_than_there_are_requests(setting):
    held = search_schedule(setting, 30.0, policies=("waa-c",), fixed={"replicas": 1}).schedule
    found, _ = best(replace(setting, workload=task("T")), held, most=3)
    assert TRAITS[found.policy].disaggregated and found.decode_batch > 3


@pytest.mark.parametrize(("share", "stays"), [(0.95, True), (0.85, False)])
def test_a_slightly_larger_cache_is_no_reason_to_pause(setting, share, stays):
    held = search_schedule(setting, 30.0, policies=("waa-c",), fixed={"replicas": 1}).schedule
    free, _ = best(setting, held)
    smaller = replace(free, kv_blocks=int(share * free.kv_blocks))
    found, _ = best(setting, smaller)
    assert takes_over_in_place(found, smaller) == stays
    assert found.kv_blocks == (smaller if stays else free).kv_blocks


def test_a_bound_that_no_schedule_meets(setting, pipeline):
    found, why_not = best(replace(setting, workload=Workload.fixed(64, 4000)), pipeline)
    assert found is None and "No schedule meets the bound of 30s: the lowest reachable latency is" in why_not


def test_a_job_of_other_devices(setting, pipeline):
    """A schedule by hand: on fewer devices than the cluster has."""
    half = replace(pipeline, stages=pipeline.stages[:2], kv_blocks=10)
    found, why_not = best(replace(setting, workload=task("C1")), half)
    assert found is None and "is for 4 devices, and this job has 2" in why_not


def test_the_process_finds_what_the_search_finds(setting, pipeline):
    asked = Asked(replace(setting, workload=task("C1")), pipeline, None)
    assert in_a_process(asked) == best(asked.setting, pipeline)


@pytest.mark.parametrize("ends", ["import os; os._exit(3)", "import sys; sys.stdin.readline(); sys.exit(3)"])
def test_a_search_that_is_ended_leaves_the_schedule_as_it_is(setting, pipeline, monkeypatch, capsys, ends):
    monkeypatch.setattr(rescheduling, "_PROCESS", ends)
    assert rescheduling.rescheduling(setting)(task("T"), pipeline) is None
    said = " ".join(capsys.readouterr().err.split())
    assert "lengths have changed, to 128.5 input and 128 output tokens on average" in said
    assert "the run keeps its schedule: the search was ended (exit code 3)" in said


RUN = """
import sys, threading, time
from exegpt.cli import rescheduling
from tests.cli.test_rescheduling import SEARCHING
rescheduling._PROCESS = SEARCHING
rescheduling.document.to_dict = lambda asked: {}
threading.Thread(target=rescheduling.in_a_process, args=(None,), daemon=True).start()
time.sleep(600)
"""
SEARCHING = """
import sys; sys.path[:] = sys.argv[1:]
import time
from exegpt.cli import rescheduling
def wait(*_):
    print("searching", file=sys.stderr, flush=True)
    time.sleep(600)
rescheduling.best = wait
rescheduling.document.from_dict = lambda *_: rescheduling.Asked(None, None, None)
rescheduling.main()
"""


def test_a_search_ends_with_a_run_that_is_killed():
    run = subprocess.Popen([sys.executable, "-c", RUN], stderr=subprocess.PIPE, text=True)
    assert run.stderr.readline() == "searching\n"
    run.kill()
    assert run.communicate(timeout=60)[1] == ""  # ends when nobody can write there any more
