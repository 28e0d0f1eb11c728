"""Predictions from published timings against what others measured on real GPUs, within the promised errors."""

import numpy as np
import pytest

from benchmarks.silicon import aggregated_rows, predict_aggregated, replayed_run, static_errors
from tests.public_data import needs_data
from xcore.specs.builtin_models import builtin_model
from xprofiler.aiconfigurator import aiconfigurator_profile, systems_folder

installed = pytest.mark.skipif(systems_folder() is None, reason="the package aiconfigurator is not installed")


@pytest.fixture(scope="module")
def run():
    needs_data("vllm_runs", "rtxpro6000_llama-3.1-8b")
    return replayed_run()


@pytest.mark.slow
def test_a_servers_run_is_predicted_request_by_request(run):
    assert len(run.measured["latency"]) == 270
    for key in ("tpot", "latency"):
        for figure in (np.mean, np.median, lambda v: np.percentile(v, 99)):
            assert figure(run.predicted[key]) == pytest.approx(figure(run.measured[key]), rel=0.04)
    assert np.mean(run.predicted["ttft"]) == pytest.approx(np.mean(run.measured["ttft"]), rel=0.08)


@pytest.mark.slow
def test_without_calibration_it_is_predicted_within_a_tenth(run):
    for key in ("ttft", "tpot", "latency"):
        assert np.mean(run.bare[key]) == pytest.approx(np.mean(run.measured[key]), rel=0.1)


@pytest.mark.slow
def test_the_cache_does_not_decide_who_is_admitted(run):
    assert run.kv_tokens > run.needed_tokens


@installed
@pytest.mark.parametrize(("system", "engine", "kv"), [("h100_sxm", "vllm", "bf16"), ("h200_sxm", "trtllm", "fp8")])
def test_aggregated_serving_of_few_clients_without_any_calibration(system, engine, kv):
    """Every row of 4 to 16 clients with 1024 + 1024 tokens: TPOT within a tenth on average."""
    rows = [r for r in aggregated_rows() if (r.system, r.engine, r.input, r.output) == (system, engine, 1024, 1024)]
    rows = [r for r in rows if r.clients <= 16]
    profile = aiconfigurator_profile(builtin_model("llama-3.1-70b"), system, engine, "fp8", kv)
    errors = [predict_aggregated(row, profile)[1] / row.tpot_ms - 1 for row in rows]
    assert len(rows) >= 9
    assert np.mean(np.abs(errors)) < 0.1


@installed
def test_static_batches_by_degree():
    needs_data("gpu", "splitwise_perf_model.csv")
    groups = static_errors()
    for tp in (2, 4, 8):
        token, prompt, *_ = np.median(np.concatenate([e.others for e in groups if e.tp == tp], axis=1), axis=1)
        assert token < 0.15 and prompt < 0.15
