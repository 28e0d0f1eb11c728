"""Inputs and outputs that depend on each other: steady states beside replays of the very requests."""

from dataclasses import replace

import numpy as np
import pytest

from tests.xcore.small_specs import schedule
from tests.xcore.specs.test_copula import drawn
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.request_times import latencies, steady_tokens_s
from xcore.specs.schedule import BLOCK_SIZE
from xcore.specs.workload import LengthDistribution, Workload
from xprofiler.roofline import roofline_profile
from xscheduler.allocation import uniform_stages
from xsimulator import estimate
from xsimulator.replay.event_simulator import replay
from xsimulator.steady.load import Load
from xsimulator.steady.residents import length_biased_context, steady_state

OPT, A40 = builtin_model("opt-13b"), parse_cluster("4xA40")
ROOFLINE = roofline_profile(OPT, A40, overhead_s=2e-3)
FREE = {"kv_blocks": 60_000, "dtype": "fp16", "kv_dtype": "fp16"}
CASES = [
    ("rra", {"encode_batch": 8, "decode_iterations": 16}),
    ("rra", {"encode_batch": 16, "decode_iterations": 150}),
    ("orca", {"prefills_per_step": 2, "max_num_seqs": 64}),
    ("chunked", {"max_num_batched_tokens": 1024, "max_num_seqs": 64}),
]


@pytest.mark.parametrize(("policy", "variables"), CASES)
@pytest.mark.parametrize("rho", [0.9, -0.8])
def test_rates_are_those_of_the_replay(policy, variables, rho):
    workload = drawn(rho, 3000)
    plan = schedule(policy, OPT, workload.without_requests, cluster=A40, stages=uniform_stages(OPT, A40, 4), **FREE)
    plan = replace(plan, control=schedule(policy, **variables).control)
    run = replay(plan, ROOFLINE, workload.requests, timeline=False)
    rate, predicted = steady_tokens_s(run.served), estimate(plan, ROOFLINE, variation=False)
    alone = estimate(replace(plan, workload=replace(plan.workload, copula=None)), ROOFLINE, variation=False)
    assert predicted.throughput_tok_s == pytest.approx(rate, rel=0.015)
    off, off_alone = (abs(each.throughput_tok_s / rate - 1) for each in (predicted, alone))
    assert off_alone > max(0.015, 2 * off), "as if they were independent"
    settled = latencies(run.served[len(run.served) // 3 : -len(run.served) // 3], "start")["latency"]
    assert predicted.latency_mean_s == pytest.approx(settled.mean(), rel=0.06)


@pytest.mark.parametrize("rho", [0.9, -0.8])
def test_blocks_are_those_of_the_requests(rho):
    """Monte Carlo: a resident is a request drawn by its iterations, at an age drawn evenly."""
    workload = drawn(rho, 20_000)
    pairs = np.array([(row.input, row.output) for row in workload.requests])
    rng = np.random.default_rng(1)
    inputs, outputs = pairs[rng.choice(len(pairs), 400_000, p=pairs[:, 1] / pairs[:, 1].sum())].T
    load = Load.of(workload, encoder_decoder=False)
    grown = -(-(inputs + rng.integers(0, outputs)) // BLOCK_SIZE)
    held = load.resident_blocks("grow")
    assert held.mean == pytest.approx(grown.mean(), rel=0.02)
    assert held.variance**0.5 == pytest.approx(grown.std(), rel=0.08), "the longest class is not divided further"
    whole = -(-(inputs + outputs - 1) // BLOCK_SIZE)
    reserved = load.resident_blocks("reserve")
    assert reserved.mean == pytest.approx(whole.mean(), rel=0.02)
    assert reserved.variance**0.5 == pytest.approx(whole.std(), rel=0.08)


def test_a_length_that_no_request_has_changes_no_blocks():
    lengths = LengthDistribution((10, 20), (0.5, 0.5)), LengthDistribution((10, 20, 40), (0.5, 0.5, 0.0))
    plain, longer = (Workload("x", LengthDistribution.fixed(100), outputs, 20) for outputs in lengths)
    held, with_more = (Load.of(each, encoder_decoder=False).resident_blocks("grow") for each in (plain, longer))
    assert (with_more.mean, with_more.variance, with_more.third) == pytest.approx(
        (held.mean, held.variance, held.third)
    )


def test_contexts_over_a_phase_have_the_mean_of_residents():
    workload = drawn(0.9)
    for iterations in (1, 7, 40, 2000):
        steady = steady_state(workload, iterations)
        mean = (steady.active * steady.context).sum() / steady.active.sum()
        assert mean == pytest.approx(length_biased_context(workload))
