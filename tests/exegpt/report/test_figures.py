"""Figures with their units, as people read them."""

from dataclasses import replace

from exegpt.report.figures import estimate_rows, percentile_rows
from tests.xcore.small_specs import schedule
from xcore.specs.estimate import Estimate

ESTIMATE = Estimate(26.52, 849.1, 4.7263, 3.536, 4.7263, 2.4867, 0.03358, 2.8988, 0.03557)


def test_an_estimates_rows_leave_out_missing_figures():
    rows = dict(estimate_rows(ESTIMATE, schedule("rra")))
    assert rows == {
        "throughput": "26.5 requests/s, 849 output tokens/s",
        "bounded latency": "4.73 s for a sequence of the 99th-percentile output length",
        "latency, all requests": "p50 3.54 s, p99 4.73 s, since start",
        "time to first token": "mean 2.49 s, p99 2.9 s",
        "time per output token": "mean 33.6 ms, p99 35.6 ms",
        "KV cache": "16,000 tokens, 1,000 blocks of 16",
    }
    several = dict(estimate_rows(ESTIMATE, schedule("rra", replicas=2)))
    assert several["KV cache"] == "16,000 tokens, 1,000 blocks of 16, each replica"


def test_memory_stands_beside_what_may_be_used():
    rra = schedule("rra")
    memory = {"memory_bytes": (3.0 * 2**30, 1.0 * 2**30), "usable_bytes": 3.5 * 2**30}
    full = replace(ESTIMATE, **memory, utilisation=(0.5, 0.25), binding="memory")
    rows = dict(estimate_rows(full, rra))
    assert rows["memory"] == "1.0–3.0 GiB at the peak, of 3.5 usable GiB per device"
    assert rows["devices busy"] == "25%–50%" and rows["limited by"] == "memory"
    alone = dict(estimate_rows(replace(full, binding="encoding"), rra))  # no search has looked at its neighbours
    assert alone["bottleneck"] == "encoding" and "limited by" not in alone


def test_violations_and_extrapolation_have_rows():
    bounded = replace(schedule("rra"), bound="p99-queries")
    rows = dict(
        estimate_rows(replace(ESTIMATE, violations=("it is late",), extrapolated=("head",), tpot_s=None), bounded)
    )
    assert rows["not feasible"] == "it is late" and rows["beyond the profile's grid"] == "head"
    assert rows["bounded latency"] == "4.73 s for 99% of all requests"
    assert rows["time per output token"] == "mean –, p99 35.6 ms"


def test_times_have_a_row_each():
    spread = {"mean": 0.5, "p50": 0.4, "p90": None, "p95": 1.0, "p99": 123.4}
    assert percentile_rows({"latency": spread}) == [["latency", "500 ms", "400 ms", "–", "1 s", "123 s"]]
