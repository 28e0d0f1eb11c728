"""Between a grid's values: points that grids miss are no better than the answer."""

import itertools

import pytest

from tests.xcore.small_specs import with_gib
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.workload import Workload
from xprofiler.roofline import roofline_profile
from xscheduler.refine import _stepped
from xscheduler.tune import tune

MISSED = {
    "whole prompts in step beside all that decode": (
        ("llama-3.1-8b", None, "2xH100-SXM", (1024, 512)),
        ("chunked", {"ttft_s": 0.0287}),
        {"tp_degree": 2, "max_num_seqs": 287, "max_num_batched_tokens": 1311},
    ),
    "as many prefills as sequences": (
        ("llama-3.1-8b", None, "2xH100-SXM", (1024, 512)),
        ("orca", {"tpot_s": 0.0121}),
        {"tp_degree": 2, "max_num_seqs": 196, "prefills_per_step": 196},
    ),
    "eight encoding micro-batches a stage": (
        ("llama-3.1-70b", "fp8", "5xH100-SXM", (500, 1500)),
        ("hybrid", {}),
        {"tp_degree": 1, "encode_batch": 441, "encode_micro_batches": 42, "micro_batches": 5},
    ),
    "a split of WAA's devices by time": (
        ("llama-3.1-8b", None, "6xB200", (4096, 64)),
        ("waa-c", {"latency_bound_s": 1.9}),
        {"encode_devices": 5, "encode_batch": 24, "replicas": 1},
    ),
}


@pytest.mark.parametrize("missed", MISSED)
def test_a_point_that_a_grid_misses_is_no_better_than_the_answer(missed):
    (name, dtype, where, lengths), (policy, bounds), fixed = MISSED[missed]
    model, cluster = builtin_model(name), parse_cluster(where)
    if "H100" in where:
        cluster = with_gib(cluster, 80)
    profile = roofline_profile(model, cluster, **({"dtype": dtype} if dtype else {}))
    setting = model, cluster, Workload.fixed(*lengths), profile
    point, answer = (tune(*setting, policies=(policy,), **bounds, fixed=set_by_hand) for set_by_hand in (fixed, {}))
    assert point.estimate is not None
    assert answer.estimate.throughput_seq_s >= 0.995 * point.estimate.throughput_seq_s


def test_steps_are_of_one_at_least_and_end_at_the_edges():
    assert list(_stepped(2, 1.05, 1, 5)) == [3, 4, 5]
    assert list(_stepped(3, 1 / 1.05, 1, 5)) == [2, 1]
    many = list(_stepped(1000, 1.05, 500, 2000))
    assert many[-1] <= 2000 < many[-1] * 1.06
    assert all(b / a == pytest.approx(1.05, rel=2e-3) for a, b in itertools.pairwise(many))
