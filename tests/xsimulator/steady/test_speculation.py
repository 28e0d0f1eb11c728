"""Steady states with speculation, against draws and replays of many requests."""

import functools
from dataclasses import replace

import numpy as np
import pytest

import xsimulator
from xcore.specs.speculation import Speculation
from xcore.specs.workload import LengthDistribution, task
from xscheduler.engine_settings import engine_schedule
from xscheduler.setting_search import search_schedule
from xscheduler.settings import find_setting
from xsimulator.replay.event_simulator import replay
from xsimulator.steady.decode_steps import in_steps

SPECULATION = Speculation(tuple(0.7**i for i in range(1, 5)))
REQUESTS = 2000


@pytest.mark.parametrize(
    "outputs",
    [task("S").output, LengthDistribution.fixed(1), LengthDistribution((1, 2, 900), (0.2, 0.3, 0.5))],
    ids=["task S", "one token", "short and long"],
)
def test_the_iterations_of_outputs_are_those_of_draws(outputs):
    rng = np.random.default_rng(0)
    drawn = 1 + SPECULATION.draw(outputs.sample(50_000, rng) - 1, rng)
    steps = in_steps(outputs, SPECULATION)
    assert steps.mean == pytest.approx(drawn.mean(), rel=0.01)
    assert steps.std == pytest.approx(drawn.std(), rel=0.02, abs=1e-9)
    for share in (0.1, 0.4, 0.9, 0.99):
        assert steps.quantile(share) == pytest.approx(np.quantile(drawn, share), rel=0.02, abs=1)


@functools.cache
def setting(cluster, workload):
    return find_setting("llama-3.1-8b", cluster, workload)


CASES = [
    ("chunked", "1xH100-SXM", "512/256", {"max_num_seqs": 64, "max_num_batched_tokens": 2048}),
    ("chunked", "1xH100-SXM", "C2", {"max_num_seqs": 64, "max_num_batched_tokens": 1024}),
    ("orca", "4xH100-SXM", "C2", {"max_num_seqs": 64, "prefills_per_step": 1}),
    ("static", "1xH100-SXM", "512/256", {"encode_batch": 32}),
    ("rra", "1xH100-SXM", "512/256", {"encode_batch": 16, "decode_iterations": 16}),
    ("orca", "1xH100-SXM", "512/16", {"max_num_seqs": 32, "prefills_per_step": 2}),
    ("rra", "1xH100-SXM", "512/16", {"encode_batch": 16, "decode_iterations": 4}),
    ("rra", "4xH100-SXM", "C2", {"encode_batch": 16, "decode_iterations": 24}),
]


@pytest.mark.parametrize(("policy", "cluster", "workload", "variables"), CASES)
def test_a_steady_state_is_that_of_a_long_replay(policy, cluster, workload, variables):
    where = setting(cluster, workload).on(policy)
    plan = engine_schedule(where, policy, max(1, where.cluster.devices // 2), None, 16, **variables)
    plan = replace(plan, speculation=SPECULATION)
    estimate = xsimulator.estimate(plan, where.profile)
    served = replay(plan, where.profile, plan.workload.draw(REQUESTS, 1), timeline=False).served
    ends = np.array([request.finish_s for request in served])
    first, last = REQUESTS // 5, REQUESTS - 1 - REQUESTS // 5
    middle = [request for request in served if ends[first] <= request.finish_s <= ends[last]]
    latencies = np.array([request.finish_s - request.start_s for request in middle])
    gaps = np.array([(r.finish_s - r.first_token_s) / (r.output_tokens - 1) for r in middle if r.output_tokens > 1])
    assert estimate.throughput_seq_s == pytest.approx((last - first) / (ends[last] - ends[first]), rel=0.03)
    assert estimate.latency_mean_s == pytest.approx(latencies.mean() + where.profile.front_end_s, rel=0.03)
    assert estimate.tpot_s == pytest.approx(gaps.mean(), rel=0.03)
    assert estimate.tpot_p99_s == pytest.approx(np.quantile(gaps, 0.99), rel=0.08)


def test_waa_serves_as_many_as_its_replay():
    where = replace(setting("4xH100-SXM", "C2").on("waa-c"), speculation=SPECULATION)
    options = {"policies": ("waa-c",), "fixed": {"encode_batch": 4, "replicas": 1}}
    plan = search_schedule(where, 4.0, **options).schedule
    served = replay(plan, where.profile, plan.workload.draw(REQUESTS, 1), timeline=False).served
    ends = np.array([request.finish_s for request in served])
    first, last = REQUESTS // 3, REQUESTS - 1 - REQUESTS // 5
    rate = (last - first) / (ends[last] - ends[first])
    assert xsimulator.estimate(plan, where.profile).throughput_seq_s == pytest.approx(rate, rel=0.03)
