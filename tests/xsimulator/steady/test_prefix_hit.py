"""Prompts of which the cache has a share, in the steady state: the event simulator's, whose prompts begin alike."""

from dataclasses import replace

import numpy as np
import pytest

from tests.xcore.small_specs import schedule
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.prefix_hit import CachedPrefix, found_tokens, with_prefix_hit
from xcore.specs.request_times import latencies, steady_tokens_s
from xcore.specs.workload import LengthDistribution, Workload, task
from xprofiler.roofline import roofline_profile
from xscheduler.allocation import uniform_stages
from xsimulator import estimate
from xsimulator.replay.event_simulator import replay
from xsimulator.steady.load import Load

CASES = [
    ("orca", {"prefills_per_step": 2, "max_num_seqs": 24}, "C2", 0.6, 4, "reserve"),
    ("orca", {"prefills_per_step": 4, "max_num_seqs": 64}, "S", 0.8, 4, "grow"),
    ("chunked", {"max_num_batched_tokens": 256, "max_num_seqs": 32}, "C2", 0.6, 4, "reserve"),
    ("chunked", {"max_num_batched_tokens": 1024, "max_num_seqs": 64}, "C1", 0.3, 4, "grow"),
    ("chunked", {"max_num_batched_tokens": 512, "max_num_seqs": 64}, "2000/80", 0.9, 4, "reserve"),
    ("chunked", {"max_num_batched_tokens": 512, "max_num_seqs": 16}, "1800/40", 0.5, 2, "reserve"),
    ("orca", {"prefills_per_step": 1, "max_num_seqs": 16}, "1800/1", 0.5, 4, "reserve"),
]
OPT, A40 = builtin_model("opt-13b"), parse_cluster("4xA40")
ROOFLINE = roofline_profile(OPT, A40, overhead_s=2e-3)


def workload_of(name, share):
    """Drawn requests with their own empirical workload, so that the draw's luck is in both sides."""
    lengths = Workload.fixed(*map(int, name.split("/"))) if "/" in name else task(name)
    workload = Workload.from_requests(name, [replace(row, arrival_s=0.0) for row in lengths.draw(1500, seed=1)])
    return with_prefix_hit(workload, share)


@pytest.mark.parametrize(("policy", "variables", "name", "share", "tp", "admission"), CASES)
def test_agrees_with_the_replay(policy, variables, name, share, tp, admission):
    workload = workload_of(name, share)
    blocks = Load.of(workload, False).pool_blocks(admission, variables["max_num_seqs"])
    blocks += Load.of(workload, False).shared_blocks
    options = {"kv_blocks": blocks, "prefix_caching": True, "admission": admission, "dtype": "fp16", "kv_dtype": "fp16"}
    stages = uniform_stages(OPT, A40, tp)
    plan = schedule(policy, OPT, workload.without_requests, cluster=A40, stages=stages, **options, **variables)
    predicted = estimate(plan, ROOFLINE, variation=False)
    run = replay(plan, ROOFLINE, workload.requests, timeline=False)
    found = sum(served.cached_tokens for served in run.served) / sum(served.input_tokens for served in run.served)
    assert found == pytest.approx(found_tokens(workload.input.s, share) @ workload.input.p / workload.input.mean, 0.02)
    assert found == pytest.approx(share, rel=0.03)
    assert predicted.throughput_tok_s == pytest.approx(steady_tokens_s(run.served), rel=0.03)
    settled = run.served[len(run.served) // 3 : -len(run.served) // 3]
    times = latencies(settled, "start")
    assert predicted.latency_mean_s == pytest.approx(times["latency"].mean(), rel=0.06)
    assert predicted.ttft_s == pytest.approx(times["ttft"].mean(), rel=0.15)
    without = estimate(replace(plan, prefix_caching=False), ROOFLINE, variation=False)
    assert predicted.throughput_tok_s > 1.02 * without.throughput_tok_s
    assert max(predicted.memory_bytes) < max(without.memory_bytes) or admission == "grow", "grow holds what there is"


def test_found_tokens_are_whole_blocks_and_never_the_last_token():
    assert found_tokens([10, 16, 17, 33, 100, 1600], 0.5).tolist() == [0, 0, 16, 16, 48, 800]
    assert found_tokens([32, 33, 1600], 0.99).tolist() == [16, 32, 1584]
    lengths = LengthDistribution((17, 40, 100), (0.25, 0.25, 0.5))
    cached = CachedPrefix.of(lengths, 0.5)
    assert (cached.mean, cached.blocks) == (0.25 * 16 + 0.25 * 16 + 0.5 * 48, 3)
    assert cached.computed == LengthDistribution((1, 24, 52), (0.25, 0.25, 0.5))


def test_without_caching_a_share_changes_nothing():
    plan = schedule("chunked", OPT, task("C1"), cluster=A40, stages=uniform_stages(OPT, A40, 4), kv_blocks=9000)
    alike = replace(plan, workload=with_prefix_hit(task("C1"), 0.5))
    assert estimate(alike, ROOFLINE) == estimate(plan, ROOFLINE)
    assert np.isclose(Load.of(alike.workload, False).resident_context, Load(task("C1"), False).resident_context, 0.01)
