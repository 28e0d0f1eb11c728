"""Limits of spaces under bounds on tokens' times: a search without them, and all of its points, find nothing better."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from xcore.policies import TRAITS
from xcore.specs.bound import BoundMeaning
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.model import usual_kv_dtype
from xcore.specs.workload import LengthDistribution, Workload
from xprofiler.roofline import roofline_profile
from xscheduler import ceilings
from xscheduler.candidates import CandidateFamily
from xscheduler.refine import refined
from xscheduler.search import search
from xscheduler.search_problem import Limits, SearchProblem
from xscheduler.space import all_spaces
from xscheduler.spaces import POLICIES, at_value, grids, spaces
from xscheduler.why_infeasible import why_infeasible
from xsimulator.cost.cost_model import CostModel
from xsimulator.steady.load import Load
from xsimulator.steady.outcome import latency, per_token, ttft

MACHINES = (
    ("llama-3.1-8b", "2xA40"),
    ("llama-3.1-8b", "3xA40"),
    ("opt-13b", "2x2xA40"),
    ("t5-3b", "3xA40"),
    ("mixtral-8x7b", "3xH200-SXM"),
    ("qwen3-30b-a3b", "4xH100-SXM"),
)
MOST = 24
"""Largest batch, so that all points can be simulated."""


def lengths(short, long):
    """Lengths of which a third are long, or equal ones."""
    few = LengthDistribution((short, short + long), (2 / 3, 1 / 3))
    return st.sampled_from([LengthDistribution.fixed(short), few])


MACHINE, LOAD = (
    st.sampled_from(MACHINES),
    st.tuples(
        st.sampled_from([8, 300, 1000]).flatmap(lambda n: lengths(n, 2 * n)),
        st.sampled_from([2, 30, 200]).flatmap(lambda n: lengths(n, 3 * n)),
    ),
)
FEW_LONG = LengthDistribution((300, 900), (2 / 3, 1 / 3))
PERCENTILE = st.sampled_from([50.0, 90.0, 99.0])


def problem_of(machine, load, percentile, overhead_s=1e-3):
    """A search problem without bounds."""
    model, cluster = builtin_model(machine[0]), parse_cluster(machine[1])
    profile = roofline_profile(model, cluster, overhead_s=overhead_s)
    costs = CostModel(model, cluster, profile, usual_kv_dtype(profile.dtype), watched=False)
    workload = Workload("drawn", *load, 1)
    return SearchProblem(
        costs, Load(workload, model.encoder_layers > 0), Limits(), {}, BoundMeaning("requests", percentile)
    )


def bounded(problem, policy, bound, place, loosened):
    """The problem with a bound on tokens' times that the point at `place` of its spaces nearly keeps."""
    made = all_spaces(spaces(policy, problem))
    space = made[int(place * (len(made) - 1))]
    where, outcome = space.where, space.outcome(space.values(tuple(int(place * at) for at in space.highest)))
    share = problem.bound.share
    seconds = ttft(where, outcome, share) if bound == "ttft_s" else per_token(where, outcome).quantile(share)
    return replace(problem, limits=Limits(**{bound: loosened * seconds}))


@settings(max_examples=40, deadline=None)
@given(MACHINE, LOAD, PERCENTILE, st.sampled_from(["ttft_s", "tpot_s"]), st.floats(0, 1), st.sampled_from([1.0, 1.3]))
def test_two_sides_have_no_better_point_than_a_search_with_limits(machine, load, percentile, bound, place, loosened):
    """A space whose limit is too low would have a better point, or be skipped with the best one."""
    with pytest.MonkeyPatch.context() as small:
        small.setattr(grids, "MOST", MOST)
        problem = bounded(problem_of(machine, load, percentile), "waa-c", bound, place, loosened)
        members = spaces("waa-c", problem)
        best, free = search(members).throughput, []
        for family in members:
            assert isinstance(family, CandidateFamily)
            for space in family.spaces:
                assert space.ceiling <= family.ceiling * (1 + 1e-9)
                meeting = [space.at(point).throughput for point in points_of(space) if space.meets(point)]
                assert max(meeting, default=0.0) <= space.ceiling
                free.append(replace(space, ceiling=math.inf))
        assert best >= search(free).throughput * (1 - 1e-6)


def test_few_long_outputs_of_a_mixture_have_no_better_point_without_ceilings():
    """With few tokens per expert, batches that shrink take less time than as many equal ones."""
    load = LengthDistribution.fixed(500), LengthDistribution((40, 160), (0.9, 0.1))
    problem = replace(problem_of(("gpt-oss-20b", "1xH100-SXM"), load, 99.0), limits=Limits(latency_s=2.0))
    free = [replace(space, ceiling=math.inf) for space in all_spaces(spaces("rra", problem))]
    assert search(spaces("rra", problem)).throughput == pytest.approx(search(free).throughput)


def points_of(space):
    """A few batches."""
    return [(place,) for place in range(0, len(space.variables[0].values), 5)]


@settings(max_examples=25, deadline=None)
@given(MACHINE, LOAD, PERCENTILE, st.sampled_from(POLICIES))
@example(MACHINES[2], (LengthDistribution.fixed(1000), LengthDistribution.fixed(2)), 50.0, "chunked")
@example(MACHINES[4], (FEW_LONG, LengthDistribution.fixed(2)), 50.0, "orca")
def test_no_latency_no_first_token_and_no_later_one_is_quicker(machine, load, percentile, policy):
    with pytest.MonkeyPatch.context() as small:
        small.setattr(grids, "MOST", MOST)
        problem = problem_of(machine, load, percentile)
        made = all_spaces(spaces(policy, problem))
    share, splits = problem.bound.share, TRAITS[policy].splits_prompts
    for space in made[:: max(1, len(made) // 8)]:
        ends = ((v.values[0], v.values[len(v.values) // 2], v.values[-1]) for v in space.variables)
        for values in itertools.product(*ends):
            outcome = space.outcome(values)
            assert latency(space.where, outcome) >= space.quickest_s
            assert ttft(space.where, outcome, share) >= ceilings.quickest_first(space.where, splits)
            assert per_token(space.where, outcome).quantile(share) >= ceilings.quickest_token(space.where)


@settings(max_examples=12, deadline=None)
@given(MACHINE, LOAD, PERCENTILE, st.sampled_from(POLICIES), st.sampled_from(["latency", "ttft", "tpot"]))
def test_the_time_that_nothing_keeps_is_the_lowest_of_all_spaces(machine, load, percentile, policy, name):
    problem = problem_of(machine, load, percentile)
    limits = Limits(**{f"{name}_s": 1e-6})
    members = spaces(policy, replace(problem, limits=limits))
    if not members or isinstance(members[0], CandidateFamily):
        return
    reason = why_infeasible(policy, members, problem)
    evaluated = sum(len(space.known) for space in members)
    corners = [space.at(space.lowest).figures for space in members]
    lowest = min(figures[2] for figures in corners if figures[0] <= 1)
    problem_alike = replace(problem, limits=Limits(**{f"{name}_s": lowest * (1 + 1e-9)}))
    again = spaces(policy, problem_alike)
    assert f"its lowest {'latency' if name == 'latency' else 'time'}" in reason
    assert "none of its schedules" in why_infeasible(policy, again, problem_alike) or math.isclose(lowest, 0)
    assert evaluated <= len(members)


def test_a_space_that_is_too_slow_is_not_searched_for_whole_prompts():
    """A floor leaves out what is below it, and changes no answer above it."""
    problem = problem_of(("llama-3.1-8b", "2xA40"), (LengthDistribution.fixed(300), LengthDistribution.fixed(16)), 99.0)
    problem = replace(problem, limits=Limits(ttft_s=0.3))

    def at(like, value):
        return at_value(problem, like, value)

    def found(floor, ceiling=None):
        members = spaces("chunked", problem)
        if ceiling:
            for space in members:
                space.ceiling = ceiling
        return refined(members, "max_num_batched_tokens", at, "bnb", 0.0, floor)[1]

    free, bare = found(0.0), found(0.0, math.inf)
    assert free.throughput == bare.throughput > 0
    near, above = found(0.97 * free.throughput), found(2 * free.throughput)
    assert near.throughput == free.throughput
    assert above.space is None and above.search.evaluations == 0 < near.search.evaluations <= free.search.evaluations


@pytest.mark.parametrize("policy", ["orca", "chunked"])
def test_a_first_token_of_a_pipeline_with_long_outputs_waits_for_its_prompt(policy):
    """Hardly any iteration has a prompt, but each first token comes after one."""
    load = LengthDistribution.fixed(1000), LengthDistribution((700, 1500), (0.5, 0.5))
    problem = problem_of(("llama-3.1-8b", "2xA40"), load, 99.0)
    pipelines = [space for space in all_spaces(spaces(policy, problem)) if len(space.where.replica.stages) == 2]
    splits = TRAITS[policy].splits_prompts
    for space in pipelines:
        first_s = ttft(space.where, space.outcome((1,)), 0.99)
        assert first_s >= ceilings.quickest_first(space.where, splits)
    assert len(pipelines) > 1
