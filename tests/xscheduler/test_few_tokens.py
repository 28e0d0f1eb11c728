"""WAA's limits under a bound on the time per token where most answers have one token, which has no such time."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.xscheduler.test_pruning import MOST, bounded, points_of, problem_of
from xcore.specs.workload import LengthDistribution
from xscheduler.search import search
from xscheduler.spaces import grids, spaces

MACHINES = (("llama-3.1-8b", "3xA40"), ("qwen3-30b-a3b", "4xH100-SXM"))


def few(length, share):
    """Outputs of which a share has this length, and the others one token."""
    return LengthDistribution((1, length), (1 - share, share)) if share < 1 else LengthDistribution.fixed(length)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(MACHINES),
    st.sampled_from([100, 1000]),
    st.builds(few, st.sampled_from([2, 30, 300]), st.sampled_from([0.002, 0.05, 0.6, 1.0])),
    st.sampled_from([50.0, 90.0, 99.0]),
    st.floats(0, 1),
    st.sampled_from([1.0, 1.3]),
)
def test_no_point_within_the_bound_exceeds_its_space(machine, inputs, outputs, percentile, place, loosened):
    """And a search without limits finds nothing better."""
    with pytest.MonkeyPatch.context() as small:
        small.setattr(grids, "MOST", MOST)
        problem = problem_of(machine, (LengthDistribution.fixed(inputs), outputs), percentile)
        problem = bounded(problem, "waa-c", "tpot_s", place, loosened)
        members, free = spaces("waa-c", problem), []
        best = search(members).throughput
        for family in members:
            for space in family.spaces:
                meeting = [space.at(point).throughput for point in points_of(space) if space.meets(point)]
                assert max(meeting, default=0.0) <= space.ceiling
                free.append(replace(space, ceiling=math.inf))
        assert best >= search(free).throughput * (1 - 1e-6)


@pytest.mark.parametrize("share", [0.002, 1.0])
def test_a_bound_below_every_iteration_leaves_no_space(share):
    """One answer in five hundred has a second token: the 99th percentile of lengths is one."""
    problem = problem_of(MACHINES[0], (LengthDistribution.fixed(100), few(30, share)), 99.0)
    tight = replace(problem, limits=replace(problem.limits, tpot_s=1e-6))
    assert tight.longest == (1 if share < 0.01 else 30)
    assert {space.ceiling for family in spaces("waa-c", tight) for space in family.spaces} == {0.0}
    alone = problem_of(MACHINES[0], (LengthDistribution.fixed(100), LengthDistribution.fixed(1)), 99.0)
    bounds = [replace(alone, limits=replace(alone.limits, tpot_s=tpot_s)) for tpot_s in (None, 1e-6)]
    ceilings = [[space.ceiling for family in spaces("waa-c", one) for space in family.spaces] for one in bounds]
    assert ceilings[0] == ceilings[1] and max(ceilings[0]) > 0
