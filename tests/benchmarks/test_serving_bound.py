"""Half a minute of the load that `benchmarks.serving_bound` sends for half an hour."""

from itertools import pairwise

import pytest

pytest.importorskip("fastapi")

from benchmarks.servers import schedule_of, tuned_server
from benchmarks.serving_bound import ACCEPTED, HEAD, MET, errors, measured, row, start_load

SIZES = {"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "ffn": 704, "vocab": 2000, "context": 1024}
BOUND = "2.5s"


OPTIONS = ["--workload", "T", "--latency-bound", BOUND]
STEADY = 0.1
"""By how much the goodputs of two servers may differ that measure this machine one after the other."""


@pytest.mark.alone
@pytest.mark.timeout(500)
def test_a_server_keeps_its_bound_under_load(tmp_path, monkeypatch):
    """At the speed that the machine had when it was measured. Where a load isn't answered as predicted, the next server
    measures the machine anew: it counts where that finds the same speed.
    """
    print(HEAD)  # what a failing test shows
    found = []
    for seed in range(4):
        monkeypatch.setenv("EXEGPT_CACHE", str(tmp_path / str(seed)))
        kept, goodput = keeps(tmp_path / str(seed), seed)
        if kept:
            return
        found.append(goodput)
    steady = [abs(after / before - 1) <= STEADY for before, after in pairwise(found)]
    if not any(steady):
        pytest.skip(f"this machine's speed changes by the minute: goodputs of {found} requests/s were predicted")
    pytest.fail(f"none of the servers keeps its promise, and the machine is steady: {found} requests/s were predicted")


def keeps(directory, seed):
    """Whether a server answers a load in time, and an overload with most of its goodput, nothing lost; its goodput."""
    directory.mkdir()
    with tuned_server(directory, BOUND, "T", SIZES) as (url, log):
        goodput = schedule_of(url)["goodput_seq_s"]
        usual, over = (loaded(url, share, goodput, seed) for share in (0.8, 2.0))
        assert errors(log, 0, "end_error_s") != "none"
    in_time = all(run["goodput_seq_s"] >= MET * run["throughput_seq_s"] for run in (usual, over))
    return in_time and over["rejected"] > 0 and over["throughput_seq_s"] >= ACCEPTED * goodput, goodput


def loaded(url, share, goodput, seed):
    run = measured(start_load(url, share * goodput, 15, seed, OPTIONS))
    print(row(f"{share:.0%} seed {seed}", run, goodput, ["", ""]))
    assert not run["failed"] and run["completed"] + run["rejected"] == run["requests"]
    return run
