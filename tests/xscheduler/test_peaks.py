"""Batches after which throughput falls: branch and bound finds what all points of the spaces have."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.xscheduler.test_pruning import problem_of
from xcore.specs.workload import LengthDistribution
from xscheduler.search import search
from xscheduler.search_problem import Limits
from xscheduler.space import all_spaces
from xscheduler.spaces import grids, spaces
from xsimulator.steady.outcome import latency

MOST = 24
"""Largest batch, so that all points can be evaluated."""
FEW_LONG = [LengthDistribution((short, 20 * short), (0.95, 0.05)) for short in (1, 5, 30)]
"""Few outputs are long: the longest of a batch rises nearly in proportion to the batch."""
VERY_LONG = LengthDistribution((100, 200, 4000), (0.6, 0.38, 0.02))
PROMPTS = [LengthDistribution.fixed(8), LengthDistribution((100, 2000), (0.95, 0.05))]
MIXTURES = [("mixtral-8x7b", "2xH200-SXM"), ("gpt-oss-20b", "1xH100-SXM"), ("qwen3-30b-a3b", "2xH100-SXM")]


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(MIXTURES),
    st.tuples(st.sampled_from(PROMPTS), st.sampled_from(FEW_LONG)),
    st.sampled_from(["static", "hybrid"]),
    st.floats(0, 1),
)
@example(("t5-11b", "2xA40"), (LengthDistribution.fixed(300), VERY_LONG), "static", 1.0)
@example(MIXTURES[0], (PROMPTS[1], FEW_LONG[1]), "hybrid", 0.15)
def test_a_search_of_static_batches_finds_the_best_of_all(machine, load, policy, place):
    """More tokens than experts let a step take much longer, and throughput falls from there."""
    with pytest.MonkeyPatch.context() as small:
        small.setattr(grids, "MOST", MOST)
        problem = problem_of(machine, load, 50.0)
        space = all_spaces(spaces(policy, problem))[0]
        slowest = space.outcome(space.values(tuple(round(place * highest) for highest in space.highest)))
        problem = replace(problem, limits=Limits(latency_s=latency(space.where, slowest) * (1 + 1e-9)))
        found = search(spaces(policy, problem)).throughput
        every = all_spaces(spaces(policy, problem))
    points = ((space, point) for space in every for point in itertools.product(*(range(h + 1) for h in space.highest)))
    best = max(space.at(point).throughput for space, point in points if space.meets(point))
    assert found == pytest.approx(best, rel=1e-9)
