"""`exegpt run` without a schedule: the schedule is searched for the very list, and one table is printed."""

import numpy as np

from xcore.document import from_dict, read
from xcore.specs.profile import Profile
from xcore.specs.schedule import Schedule
from xcore.specs.workload import RequestLengths, Workload
from xscheduler.setting_search import search_schedule
from xscheduler.settings import find_setting
from xscheduler.ties import TIE
from xsimulator.replay.event_simulator import replay


def skewed(path) -> list[RequestLengths]:
    """Write a trace of 24 requests with a heavy tail of outputs."""
    rng = np.random.default_rng(2)
    rows = [
        (int(i), min(60, int(1 + 4 * o))) for i, o in zip(rng.integers(4, 40, 24), rng.pareto(1.1, 24), strict=True)
    ]
    path.write_text("input,output\n" + "".join(f"{i},{o}\n" for i, o in rows))
    return [RequestLengths(*row) for row in rows]


def test_the_schedule_completes_the_list_no_later_than_any_steady_optimum(exegpt, tiny, tiny_profile, tmp_path):
    requests = skewed(tmp_path / "t.csv")
    command = ("run", "-m", tiny, "-r", tmp_path / "t.csv", "-p", tiny_profile, "--latency-bound", "60s")
    schedule = from_dict(Schedule, exegpt(*command, "--json").json["schedule"], "schedule")
    profile = read(Profile, tiny_profile)
    setting = find_setting(str(tiny), "local", Workload.from_requests("requests", requests), str(tiny_profile))
    steady = search_schedule(setting, 60.0, most_resident=24)
    runs = [replay(a.schedule, profile, requests).seconds for a in steady.alternatives if a.schedule]
    assert replay(schedule, profile, requests).seconds <= min(runs) / (1 - TIE)


def test_a_run_prints_one_row_of_tokens_latency_and_bound(exegpt, tiny, tiny_profile, tmp_path):
    skewed(tmp_path / "t.csv")
    command = ("run", "-m", tiny, "-r", tmp_path / "t.csv", "-p", tiny_profile, "--policy", "static")
    done = exegpt(*command, "--latency-bound", "60s")
    assert done.code == 0, done.err
    columns, _, row = done.out.splitlines()[2:5]
    assert "predicted tok/s" in columns and "p99 latency" in columns and columns.rstrip().endswith("bound met")
    assert row.split()[0] == "static" and row.split()[-1] == "yes"
    assert "iteration" not in done.out
    assert "bound met" not in exegpt(*command).out  # without a bound
