"""Spaces of hybrid static batches: the batch, at several numbers of encoding and of decoding micro-batches."""

from xcore.policies.hybrid import TRAITS
from xscheduler.candidates import Candidates
from xscheduler.search_problem import SearchProblem
from xscheduler.spaces.grids import at_value, encode_counts, enumerated, grid, pipelines, static_batches_of
from xscheduler.spaces.policy_space import PolicySpace, Spaces


def _spaces(policy: str, problem: SearchProblem) -> Spaces:
    for layout in pipelines(problem, uniform=True):
        scenario, stages = problem.both(layout), len(layout.degrees)
        for encode_count in encode_counts(problem, layout):
            for parts in enumerated(problem, "micro_batches", tuple(sorted({1, -(-stages // 2), stages}))):
                batches, bounds = (
                    static_batches_of(problem, scenario, encode_count, parts),
                    problem.phased_bounds(layout),
                )
                counts = {"encode_micro_batches": encode_count, "micro_batches": parts}
                yield grid(policy, problem, layout, (batches,), bounds, **counts)


def _at_value(problem: SearchProblem, like: Candidates, value: int) -> Candidates:
    return at_value(problem, "encode_micro_batches", like, value)


SPACE = PolicySpace(TRAITS.name, _spaces, "encode_micro_batches", _at_value)
