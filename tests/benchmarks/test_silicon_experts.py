"""Served mixtures of experts: which rows are compared, and what calibrates an engine's time."""

import pytest

from benchmarks.engine_calibration import EngineTime, calibrated, tenth
from benchmarks.silicon import Aggregated
from benchmarks.silicon_experts import _left_out
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xprofiler.roofline import roofline_profile


def row(clients, tokens=1024, measured=(1.0, 1.0)):
    return Aggregated(f"{tokens} x{clients}", "h200_sxm", "vllm", 2, clients, tokens, 512, *measured)


def served(of, time):
    """TTFT and TPOT in milliseconds, linear in an engine's time."""
    ttft = 20 + 1e3 * (2 * time.iteration_s + time.request_s) + 0.01 * of.input * (1 + time.longer)
    return ttft, 5 + 1e3 * (time.iteration_s + of.clients * time.sequence_s) + 2e-3 * of.clients * time.longer


def test_an_engines_time_is_found_from_rows_that_have_it():
    true = EngineTime(2e-3, 20e-6, 0.5, 0.03)
    rows = [row(c, n) for c in (4, 16, 64) for n in (1024, 8192)]
    rows = [row(of.clients, of.input, served(of, true)) for of in rows]
    found = calibrated(rows, served)
    assert found.iteration_s == pytest.approx(2e-3) and found.sequence_s == pytest.approx(20e-6)
    assert found.longer == pytest.approx(0.5) and found.request_s == pytest.approx(0.03)
    faster = [row(of.clients, of.input, (15.0, 4.0)) for of in rows]
    assert calibrated(faster, served) == EngineTime()  # no constant is negative
    assert calibrated([], served) == EngineTime()


def test_the_time_is_that_of_a_profile_whose_large_steps_take_longer():
    model, cluster = builtin_model("gpt-oss-20b"), parse_cluster("1xH100-SXM")
    before = roofline_profile(model, cluster, "mxfp4", (1,))
    after = EngineTime(1e-3, 10e-6, 0.5, 0.02).of(before)
    rest, longer = before.degree(1).decoder.rest, after.degree(1).decoder.rest
    assert [longer(n) / rest(n) for n in (1, 512, 768, 8192)] == pytest.approx([1, 1, 1.5, 1.5])
    assert after.overhead(100) == pytest.approx(1e-3 + 100 * 10e-6) and after.front_end_s == 0.02


def test_a_tenth_of_the_rows_calibrates_whatever_they_measured():
    rows = [row(n) for n in range(1, 40)]
    assert [of.clients for of in tenth(rows)] == [1, 11, 21]
    assert tenth(rows[:9]) == [] and len(tenth([row(n) for n in range(200)])) <= 8
    assert [of.name for of in tenth(rows)] == [of.name for of in tenth([row(n, measured=(9, 9)) for n in range(1, 40)])]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"moe_tp_size": "1", "moe_ep_size": "4"}, ""),
        ({"tp_size": "16", "moe_tp_size": "4", "moe_ep_size": "4"}, "degrees"),
        ({"moe_tp_size": "2"}, "degrees"),
        ({"moe_tp_size": "2", "moe_ep_size": "2"}, "splits"),
        ({"attention_dp_size": "2", "moe_tp_size": "8"}, "splits"),
        ({"silicon_ttft_ms": "12000"}, "ten seconds"),
    ],
)
def test_rows_that_cant_be_compared_are_left_out(changes, reason):
    plain = {"tp_size": "4", "attention_dp_size": "", "moe_tp_size": "4", "moe_ep_size": "1", "silicon_ttft_ms": "90"}
    left_out = _left_out(plain | changes)
    assert reason in left_out and bool(left_out) == bool(reason)
