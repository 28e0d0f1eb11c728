"""Half a minute of the load that `benchmarks.serving_bound` sends for half an hour."""

import pytest

pytest.importorskip("fastapi")

from benchmarks.servers import schedule_of, tuned_server
from benchmarks.serving_bound import ACCEPTED, MET, errors, measured, start_load

SIZES = {"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "ffn": 704, "vocab": 2000, "context": 1024}
BOUND = "2.5s"


@pytest.mark.alone
@pytest.mark.timeout(400)
def test_a_server_keeps_its_bound_under_load(tmp_path):
    """At the speed that the machine had when the server measured it: a load is repeated where other work was beside."""
    options = ["--workload", "T", "--latency-bound", BOUND]
    with tuned_server(tmp_path, BOUND, "T", SIZES) as (url, log):
        goodput = schedule_of(url)["goodput_seq_s"]
        for share in (0.8, 2.0):
            assert any(kept(url, share, goodput, seed, options) for seed in (1, 2, 3))
        assert errors(log, 0, "end_error_s") != "none"


def kept(url, share, goodput, seed, options):
    """Whether a load was answered in time, and an overload with most of the goodput; nothing may fail or be lost."""
    run = measured(start_load(url, share * goodput, 15, seed, options))
    assert not run["failed"] and run["completed"] + run["rejected"] == run["requests"]
    in_time = run["goodput_seq_s"] >= MET * run["throughput_seq_s"]
    return in_time and (share < 1 or (run["rejected"] > 0 and run["throughput_seq_s"] >= ACCEPTED * goodput))
