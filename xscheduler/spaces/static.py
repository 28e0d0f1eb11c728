"""Spaces of static batches: the batch."""

from xcore.policies.static import TRAITS
from xscheduler.search_problem import SearchProblem
from xscheduler.spaces.grids import grid, pipelines, static_batches_of
from xscheduler.spaces.policy_space import PolicySpace, Spaces


def _spaces(policy: str, problem: SearchProblem) -> Spaces:
    for layout in pipelines(problem, uniform=True):
        stages = len(layout.degrees)
        batches = static_batches_of(problem, problem.both(layout), stages, stages)
        yield grid(policy, problem, layout, (batches,), problem.phased_bounds(layout))


SPACE = PolicySpace(TRAITS.name, _spaces)
