"""The agents' benchmark: its runs are what it says of them, and its orders differ in the replay as they should."""

import json
from collections import Counter

import pytest

from benchmarks import agents
from benchmarks.servers import orca
from tests.exegpt.cli.conftest import run_command
from tests.xcore.small_specs import profile
from xcore import document
from xcore.specs.model import ModelSpec
from xmulti.files.call_log import learn


def test_runs_have_the_shares_and_logs_that_they_should():
    runs = agents.draw_runs(3, 2000)
    shares = Counter(run.kind for run in runs)
    assert all(shares[kind] / 2000 == pytest.approx(share, abs=0.02) for kind, (share, _) in agents.KINDS.items())
    for run in runs[:50]:
        pauses_s = sum(visit.seconds for visit in run.visits if not visit.output)
        ending = 0.0
        for visit in reversed(run.visits):
            if visit.output:
                break
            ending += visit.seconds
        assert sum(pause for _, pause in run.calls) == pytest.approx(pauses_s - ending)
    (small,) = learn(line for number, run in enumerate(runs) if run.kind == "small" for line in run.log(number))
    nexts = Counter(small.unit("ask").next_units)
    assert nexts["search"] / nexts.total() == pytest.approx(0.6, abs=0.05)
    sums = {
        kind: sum(v.output for run in runs if run.kind == kind for v in run.visits) / n for kind, n in shares.items()
    }
    assert 3 * sums["small"] < sums["medium"] < sums["large"] / 3


@pytest.mark.slow
def test_gittins_completes_runs_sooner_in_the_replay(tmp_path):
    """At 0.9 of the rate at which all calls at once are done; a profile that depends on no clock."""
    agents.SIZES.create(tmp_path / "model", seed=1)
    schedule = orca(tmp_path / "model", agents.AT_ONCE)
    document.write(tmp_path / "schedule.json", schedule)
    document.write(tmp_path / "profile.json", profile(ModelSpec.from_directory(tmp_path / "model")))
    log = [line for number, run in enumerate(agents.draw_runs(agents.LEARNED_SEED, 400)) for line in run.log(number)]
    (tmp_path / "graphs.json").write_text(json.dumps([document.to_dict(graph) for graph in learn(log)]))
    runs = agents.draw_runs(303, 300)
    arrivals = agents.arrivals_of(tmp_path, schedule, runs, 303, 1.0)
    agents.write_trace(tmp_path / "trace.csv", runs, arrivals, 1.0)
    common = ("simulate", "-s", tmp_path / "schedule.json", "-p", tmp_path / "profile.json", "--json")
    means = []
    for order in (("--order", "fcfs"), ("--order", "gittins", "--graphs", tmp_path / "graphs.json")):
        done = run_command(*common, "--replay", tmp_path / "trace.csv", *order)
        assert done.code == 0, done.err
        assert done.json["runs"]["count"] == 300
        means.append(done.json["runs"]["completion"]["mean"])
    assert means[1] < (1 - agents.GAIN) * means[0]
