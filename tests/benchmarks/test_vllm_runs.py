"""Published vLLM runs that nothing was fitted on, within the documented errors."""

from itertools import islice

from benchmarks.vllm_runs import open_loop, request_by_request
from tests.public_data import needs_data


def test_an_open_loop_below_saturation_is_predicted_within_a_tenth():
    """The first two rates; `python -m benchmarks.vllm_runs` has all."""
    needs_data("measured", "inference_perf", "kubecon2025_llama3-8b_h100.csv")
    for _, measured, predicted in islice(open_loop(), 2):
        latency, tpot, ttft = predicted.errors(measured)
        assert abs(latency) < 0.1 and abs(tpot) < 0.1 and abs(ttft) < 0.25


def test_a_run_on_two_devices_is_predicted_request_by_request():
    needs_data("measured", "llmservingsim2", "Qwen3-32B", "requests.jsonl")
    measured, predicted = request_by_request()
    latency, tpot, ttft = predicted.errors(measured)
    assert abs(tpot) < 0.08 and max(abs(latency), abs(ttft)) < 0.15
