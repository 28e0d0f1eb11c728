"""RRA's spaces: which N_D they hold, and that branch and bound is exact where throughput doesn't rise along them."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exegpt.builtin_models import builtin_model
from exegpt.cluster import parse_cluster
from exegpt.profile import Table
from exegpt.workload import LengthDistribution, task
from xprofiler.roofline import roofline_profile
from xscheduler.monotonicity import violations
from xscheduler.policy_spaces import iteration_counts, spaces
from xscheduler.question import Limits, Question
from xscheduler.search import search
from xsimulator.cost.replica import CostModel
from xsimulator.steady.load import Load

OPT = builtin_model("opt-13b")
A40 = parse_cluster("4xA40")


@given(st.integers(1, 10_000), st.floats(0.1, 1.0))
def test_no_n_d_that_matters_is_left_out(most, share):
    """Latency steps where the bound's length needs one phase more: the least N_D before each step is there."""
    length = max(1, int(most * share))
    counts = iteration_counts(LengthDistribution.fixed(most), length)
    assert list(counts) == sorted(set(counts), reverse=True)
    assert (counts[0], counts[-1]) == (most, 1)
    assert set(range(1, min(most, 64) + 1)) <= set(counts)
    assert len(counts) <= 64 + 2 * most // 64 + 200
    need = length - 1
    for n in range(64, need, 97):
        phases = -(-need // n)
        assert -(-need // phases) in counts
    assert all(a <= 1.05 * b + 1 for a, b in itertools.pairwise(counts))


def rra_spaces(tp, profile, limit, name, most=24):
    """RRA's space of a task on four A40, cut to an exhaustive search's patience."""
    fixed = {"replicas": 1, "tp_degree": tp, "tp_gpus": 4}
    question = Question(CostModel(OPT, A40, profile, "fp16"), Load(task(name), False), Limits(latency_s=limit), fixed)
    found = spaces("rra", replace(question, encode_micro_batches=(1,)))
    for space in found:
        space.variables = tuple(replace(v, values=tuple(n for n in v.values if n <= most)) for v in space.variables)
    return found


@pytest.mark.parametrize("limit", [20.0, 40.0])
def test_exact_on_a_pipeline_that_drains_between_phases(limit):
    """Four stages: at N_D = 1 the drain after every phase costs more than the smaller batches of N_D = 2 do."""
    profile = roofline_profile(OPT, A40)
    by_n_d = {space.variables[1].values: space for space in rra_spaces(1, profile, limit, "T")}
    assert set(by_n_d) - {(n,) for n in range(1, 5)} == {tuple(range(24, 4, -1))}  # phases that drain stand apart
    twice, once = (by_n_d[n,].simulate((24, n)).throughput for n in (2, 1))
    assert once < twice
    oracle = search(rra_spaces(1, profile, limit, "T"), "exhaustive")
    found = search(rra_spaces(1, profile, limit, "T"))
    assert found.throughput == oracle.throughput
    assert found.search.evaluations < 0.5 * found.search.space


def test_close_to_exact_on_measured_times_that_are_not_smooth():
    """Tables with 5 % of noise: throughput isn't monotone, and at least 99 % of the optimum's is still found."""
    rng = np.random.default_rng(0)
    smooth = roofline_profile(OPT, A40, overhead_s=5e-3)

    def noisy(table):
        return Table(table.axes, table.points, tuple(v * rng.uniform(0.95, 1.05) for v in table.values))

    degrees = [
        replace(
            d,
            decoder=replace(d.decoder, rest=noisy(d.decoder.rest), decode_attention=noisy(d.decoder.decode_attention)),
        )
        for d in smooth.degrees
    ]
    profile = replace(smooth, source="measured", degrees=tuple(degrees))
    (space,) = rra_spaces(4, profile, 5.0, "S")
    assert max(v.throughput for v in violations(space, 0.0)) > 0.0
    for limit in (1.5, 2.5, 5.0, 10.0):
        oracle = search(rra_spaces(4, profile, limit, "S"), "exhaustive")
        found = search(rra_spaces(4, profile, limit, "S"))
        assert oracle.space is not None
        assert found.throughput >= 0.99 * oracle.throughput
