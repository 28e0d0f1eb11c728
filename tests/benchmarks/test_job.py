"""Schedules run by one process and by the ranks of a job: the same requests, every run reported."""

from pathlib import Path

import pytest

from benchmarks.job import run_all
from tests.xrunner.cells import LENGTHS, SIZES, disaggregated, requests, schedule
from xcore.specs.model import ModelSpec
from xrunner.models.create import create_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "llama"
    create_model(path, "llama", kv_heads=2, **SIZES)
    return path


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_schedule_serves_every_request(model, tmp_path, monkeypatch, ranks):
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setenv("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
    spec = ModelSpec.from_directory(model)
    if ranks == 1:
        plans = [schedule(spec, "orca"), schedule(spec, "static")]
    else:
        pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install -e '.[mpi]'")
        plans = [schedule(spec, replicas=2), disaggregated(spec, (1,), (1,))]
    done = run_all(model, plans, requests(), ranks, 1, tmp_path)
    assert len(done.runs) == len(plans) and done.flops_s > 0 and done.bytes_s > 0
    for run in done.runs:
        served = {request.index: (request.input_tokens, request.output_tokens) for request in run.served}
        assert [served[i] for i in range(len(LENGTHS))] == LENGTHS
        assert run.seconds == run.timeline.seconds > 0
        assert run.tokens_s == pytest.approx(sum(output for _, output in LENGTHS) / run.seconds)
        assert {span.device for span in run.timeline.spans} == set(range(ranks))
