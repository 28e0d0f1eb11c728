"""Replays of published vLLM runs: their requests, and their errors where the data are."""

import pytest

from benchmarks.vllm_runs import (
    FILE,
    LIMITS,
    OUTPUT,
    VARIANTS,
    Row,
    compare,
    predicted,
    read_rows,
    request_by_request,
    requests_of,
    setting_of,
)
from tests.public_data import needs_data
from xcore.traces.prefixes import Prefixes
from xscheduler.engine_settings import follow

ROW = Row("vllm", 50.0, 1.0, 400, 204.3, 62.4, 0.03, 0.6)


def test_prompts_of_a_group_begin_alike_and_equal_ones_are_alike():
    requests = requests_of(ROW, 0)
    assert len(requests) == 400 and {(r.input, r.output) for r in requests} == {(204, OUTPUT)}
    assert 7 < requests[-1].arrival_s < 8 and requests == sorted(requests, key=lambda r: r.arrival_s)
    assert (
        len({r.identity.token_ids for r in requests}) > 90 and len({r.identity.token_ids[:100] for r in requests}) == 10
    )
    prefixes = Prefixes.of(requests, 16)
    assert set(prefixes.shared.tolist()) == {0, 96, 192}


def test_the_time_per_token_is_the_latency_without_the_first():
    assert ROW.figures == pytest.approx({"latency": 0.6, "time per token": 0.57 / 61.4, "TTFT": 0.03})


@pytest.mark.skipif(not FILE.exists(), reason=f"public data are not here: {FILE}")
def test_rows_below_saturation_are_within_the_limits():
    """The time to first token of an idle server is left out: its devices and processes had slowed down."""
    setting, rows = setting_of(), read_rows()
    assert len(rows) == 13 and sum(row.saturated for row in rows) == 2
    for row in rows:
        if not row.saturated:
            schedule, _ = follow(setting, VARIANTS[row.variant])
            figures = predicted(row, schedule, setting.profile, 0)
            for name, measured in row.figures.items():
                if name != "TTFT" or row.rate > 2:
                    assert figures[name] == pytest.approx(measured, rel=LIMITS[name]), (row, name)


def test_a_run_on_two_devices_is_predicted_request_by_request():
    needs_data("measured", "llmservingsim2", "Qwen3-32B", "requests.jsonl")
    _, errors = compare(*request_by_request())
    assert abs(errors["time per token"]) < 0.08 and max(abs(errors["latency"]), abs(errors["TTFT"])) < 0.15
