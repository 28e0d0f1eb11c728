"""Searching again while a run goes on: what is promised is what the ranks can run, and moving must be worth it."""

import subprocess
import sys
from dataclasses import replace

import pytest

from xcore.orders import fcfs
from xcore.policies import TRAITS
from xcore.policies.from_schedule import make_ledger
from xcore.specs.change import takes_over_in_place
from xcore.specs.workload import Workload, task
from xscheduler import reschedule
from xscheduler.reschedule import WORTH, SearchInput, best, best_for_arrivals, in_a_process
from xscheduler.setting_search import search_schedule
from xscheduler.settings import find_setting
from xsimulator import estimate


@pytest.fixture(scope="module")
def setting():
    return find_setting("opt-13b", "4xA40", "S", None, engine="exegpt")


@pytest.fixture(scope="module")
def pipeline(setting):
    """RRA on four stages."""
    fixed = {"replicas": 1, "tp_degree": 1}
    return search_schedule(setting, 30.0, policies=("rra",), fixed=fixed).schedule


def rate(schedule, setting):
    return estimate(schedule, setting.profile).throughput_tok_s


def test_what_is_as_good_in_place_stays(setting, pipeline):
    schedule, _ = best(replace(setting, workload=task("C1")), pipeline)
    assert takes_over_in_place(schedule, pipeline) and schedule.kv_blocks <= pipeline.kv_blocks


@pytest.mark.parametrize("blocks", [2000, *(pytest.param(blocks, marks=pytest.mark.slow) for blocks in (4000, 8000))])
@pytest.mark.slow
def test_a_larger_cache_must_be_worth_it(setting, pipeline, blocks):
    there = replace(setting, workload=task("C1"))
    held = replace(pipeline, kv_blocks=blocks)
    options = {"policies": ("rra",), "fixed": {"replicas": 1}, "bound": held.meaning}
    free = search_schedule(there, 30.0, **options).schedule
    schedule, _ = best(there, held)
    within = search_schedule(there, 30.0, **options | {"fixed": {"replicas": 1, "tp_degree": 1}}, kv_blocks=blocks)
    worth = rate(within.schedule, setting) < (1 - WORTH) * rate(free, setting)
    assert takes_over_in_place(schedule, held) == (not worth)
    assert schedule == (free if worth else within.schedule)


@pytest.mark.slow
def test_other_layers_where_those_that_are_there_are_too_slow(setting, pipeline):
    """No variables that were schedule for other stages."""
    schedule, _ = best(replace(setting, workload=task("G")), pipeline)
    assert schedule.stages != pipeline.stages
    printed = estimate(schedule, setting.profile)
    assert printed.latency_s <= 30 and printed.feasible


def test_sides_that_fill_their_memory_with_more_than_there_are_requests(setting):
    held = search_schedule(setting, 30.0, policies=("waa-c",), fixed={"replicas": 1}).schedule
    schedule, _ = best(replace(setting, workload=task("T")), held, most=3)
    assert TRAITS[schedule.policy].disaggregated and schedule.control.decode_batch > 3


@pytest.mark.parametrize(("share", "stays"), [(0.95, True), (0.85, False)])
def test_a_slightly_larger_cache_is_no_reason_to_pause(setting, share, stays):
    held = search_schedule(setting, 30.0, policies=("waa-c",), fixed={"replicas": 1}).schedule
    free, _ = best(setting, held)
    smaller = replace(free, kv_blocks=int(share * free.kv_blocks))
    schedule, _ = best(setting, smaller)
    assert takes_over_in_place(schedule, smaller) == stays
    assert schedule.kv_blocks == (smaller if stays else free).kv_blocks


def test_a_bound_that_no_schedule_meets(setting, pipeline):
    schedule, why_not = best(replace(setting, workload=Workload.fixed(64, 4000)), pipeline)
    assert schedule is None and "No schedule meets the bound of 30s: the lowest reachable latency is" in why_not


def test_a_job_of_other_devices(setting, pipeline):
    """A schedule by hand: on fewer devices than the cluster has."""
    half = replace(pipeline, stages=pipeline.stages[:2], kv_blocks=10)
    schedule, why_not = best(replace(setting, workload=task("C1")), half)
    assert schedule is None and "needs 4 devices, but this run has 2" in why_not


@pytest.mark.slow
def test_the_process_finds_what_the_search_finds(setting, pipeline):
    search_input = SearchInput(replace(setting, workload=task("C1")), pipeline, None)
    assert in_a_process(search_input) == best(search_input.setting, pipeline)


@pytest.mark.parametrize("ends", ["import os; os._exit(3)", "import sys; sys.stdin.readline(); sys.exit(3)"])
def test_a_search_that_is_ended_leaves_the_schedule_as_it_is(setting, pipeline, monkeypatch, capsys, ends):
    monkeypatch.setattr(reschedule, "_PROCESS", ends)
    assert reschedule.rescheduler(setting)(task("T"), pipeline) is None
    printed = " ".join(capsys.readouterr().err.split())
    assert "lengths have changed to 128.5 input and 128 output tokens on average" in printed
    assert "the run keeps its schedule: the search was ended (exit code 3)" in printed


def test_a_search_that_cannot_be_started_leaves_the_schedule_as_it_is(setting, pipeline, monkeypatch, capsys):
    def fails(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(reschedule.subprocess, "Popen", fails)
    assert reschedule.rescheduler(setting)(task("T"), pipeline) is None
    printed = " ".join(capsys.readouterr().err.split())
    assert "the run keeps its schedule: the search could not be started (cannot allocate memory)" in printed


RUN = """
import sys, threading, time
from xscheduler import reschedule
from tests.xscheduler.test_reschedule import SEARCHING
reschedule._PROCESS = SEARCHING
reschedule.document.to_dict = lambda asked: {}
threading.Thread(target=reschedule.in_a_process, args=(None,), daemon=True).start()
time.sleep(600)
"""
SEARCHING = """
import sys; sys.path[:] = sys.argv[1:]
import time
from xscheduler import reschedule
def wait(*_):
    print("searching", file=sys.stderr, flush=True)
    time.sleep(600)
reschedule.best = wait
reschedule.document.from_dict = lambda *_: reschedule.SearchInput(None, None, None)
reschedule.main()
"""


def test_a_search_ends_with_a_run_that_is_killed():
    run = subprocess.Popen([sys.executable, "-c", RUN], stderr=subprocess.PIPE, text=True)
    assert run.stderr.readline() == "searching\n"
    run.kill()
    assert run.communicate(timeout=60)[1] == ""  # ends when all writers are gone


@pytest.mark.parametrize(
    ("policy", "workload"),
    [
        ("orca", "T"),
        ("chunked", "T"),
        ("rra", "C1"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("orca", "C1"), ("chunked", "C1"), ("rra", "T"))),
    ],
)
def test_a_new_schedule_keeps_the_cache_of_the_one_that_is_held(setting, policy, workload):
    """Its admission, prefix caching and block size are settings of the run, which no lengths change."""
    fixed = {"replicas": 1, "tp_degree": 4}
    held = search_schedule(setting, 30.0, policies=(policy,), fixed=fixed).schedule
    cache = {"admission": "grow", "prefix_caching": policy != "rra", "block_size": 32}
    held = replace(held, kv_blocks=held.kv_blocks // 2, **cache)
    schedule, why_not = best(replace(setting, workload=task(workload)), held)
    assert schedule, why_not
    assert {name: getattr(schedule, name) for name in cache} == cache


@pytest.mark.parametrize(
    "cache",
    [
        {"admission": "grow"},
        pytest.param({"prefix_caching": True}, marks=pytest.mark.slow),
        pytest.param({"block_size": 32}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_a_server_whose_lengths_drift_keeps_its_cache(cache):
    setting = find_setting("opt-1.3b", "1xA40", "S", None)
    held = search_schedule(setting, 30.0, policies=("orca",)).schedule
    schedule, why_not = best_for_arrivals(replace(setting, workload=task("T")), replace(held, **cache))
    assert schedule, why_not
    assert {name: getattr(schedule, name) for name in cache} == cache
    make_ledger(schedule, fcfs)  # which its policy has
