"""Requests of one output length, which stay in step, beside a saturated replay: on one stage and on several, with
inputs of one length or of many.
"""

import numpy as np
import pytest

from tests.xsimulator.steady.test_few_residents import LLAMA, plan_of, replayed
from xcore.specs.cluster import parse_cluster
from xcore.specs.engine_spec import ENGINES
from xcore.specs.workload import LengthDistribution, Workload
from xprofiler.roofline import roofline_profile
from xsimulator import estimate


def check(policy, workload, count, n, devices=1, engine="none", share=0.03, around=(99, 99), tpot=None, **controls):
    """Compare an estimate with a replay of `count` requests: its TTFT p99 with those percentiles of the replay."""
    requests = workload.draw(count, seed=1)
    cluster, workload = parse_cluster(f"{devices}xH100-SXM"), Workload.from_requests("drawn", requests)
    plan = plan_of(policy, workload, n, cluster, **controls)
    profile = roofline_profile(LLAMA, cluster, "bf16", engine=ENGINES[engine])
    times, rate, _ = replayed(plan, profile, requests)
    predicted = estimate(plan, profile)
    assert predicted.throughput_seq_s == pytest.approx(rate, rel=0.03)
    assert predicted.latency_mean_s == pytest.approx(times["latency"].mean(), rel=0.03 if tpot is None else 0.05)
    assert predicted.ttft_s == pytest.approx(times["ttft"].mean(), rel=share)
    if tpot:
        assert predicted.tpot_s == pytest.approx(times["tpot"].mean(), rel=tpot)
    low, high = np.percentile(times["ttft"], around)
    assert low * (1 - share) <= predicted.ttft_p99_s <= high * (1 + share)


@pytest.mark.parametrize("engine", ["none", "vllm"])
@pytest.mark.parametrize(
    ("lengths", "n", "budget"), [((1000, 1), 4, 1988), ((2048, 1), 12, 4075), ((1000, 2), 33, 1990), ((300, 3), 6, 453)]
)
def test_the_rate_does_not_depend_on_where_it_is_measured(lengths, n, budget, engine):
    """Prompts that don't fill iterations evenly come back to the same place only after several rounds."""
    check("chunked", Workload.fixed(*lengths), 60 * n + 3000, n, engine=engine, max_num_batched_tokens=budget)


@pytest.mark.parametrize("engine", ["none", "vllm"])
@pytest.mark.parametrize("lengths", [(2048, 1), (2048, 4), (3000, 64)])
def test_a_chunk_that_ends_no_prompt_samples_nothing(lengths, engine):
    check("chunked", Workload.fixed(*lengths), 400, 1, engine=engine, max_num_batched_tokens=lengths[0] // 10)


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize(
    ("policy", "lengths", "n", "controls"),
    [
        ("orca", (2048, 128), 32, {"prefills_per_step": 8}),
        ("orca", (300, 2), 3, {"prefills_per_step": 2}),
        ("orca", (4000, 1), 2, {"prefills_per_step": 2}),
        ("chunked", (1500, 20), 16, {"max_num_batched_tokens": 2048}),
        ("chunked", (300, 4), 24, {"max_num_batched_tokens": 900}),
        ("chunked", (1000, 1), 8, {"max_num_batched_tokens": 2100}),
    ],
)
def test_pipelines_are_predicted_as_they_are_replayed(policy, lengths, n, controls, devices):
    check(policy, Workload.fixed(*lengths), 60 * n + 3000, n, devices, **controls)


def varied(inputs, output):
    return Workload("varied", *map(LengthDistribution.from_samples, (inputs, [output])), output)


INPUTS = {
    "lognormal": np.maximum(np.random.default_rng(1).lognormal(6.2, 0.8, 400), 1).astype(int).tolist(),
    "even": list(range(300, 900)),
    "two": [200, 2000],
}


@pytest.mark.parametrize("inputs", list(INPUTS))
@pytest.mark.parametrize(
    ("policy", "output", "n", "controls", "devices"),
    [
        ("orca", 64, 16, {"prefills_per_step": 16}, 1),
        ("chunked", 256, 8, {"max_num_batched_tokens": 2048}, 1),
        ("chunked", 16, 33, {"max_num_batched_tokens": 1980}, 1),
        ("chunked", 16, 12, {"max_num_batched_tokens": 600}, 2),
    ],
)
def test_inputs_that_vary_stay_in_step_where_outputs_do_not(inputs, policy, output, n, controls, devices):
    check(policy, varied(INPUTS[inputs], output), 20_000, n, devices, share=0.06, around=(97.5, 99.7), **controls)


MOSTLY_ONE = {"9 of 10 of one": [1] * 9 + [2], "5 of 6 of one": [1] * 5 + [3], "up to five": [1, 2, 3, 4, 5]}


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("outputs", list(MOSTLY_ONE))
@pytest.mark.parametrize(
    ("policy", "n", "controls"),
    [
        ("chunked", 16, {"max_num_batched_tokens": 2048}),
        ("chunked", 4, {"max_num_batched_tokens": 512}),
        ("orca", 2, {"prefills_per_step": 2}),
        ("orca", 16, {"prefills_per_step": 4}),
    ],
)
def test_short_outputs_are_predicted_as_they_are_replayed(policy, n, controls, outputs, devices):
    """A micro-batch without any decoding sequence waits for no token, and of a stay most is prefill."""
    workload = Workload("short", *map(LengthDistribution.from_samples, (INPUTS["even"], MOSTLY_ONE[outputs])), 3)
    check(policy, workload, 8000, n, devices, share=0.06, around=(95, 99.7), tpot=0.08, **controls)
