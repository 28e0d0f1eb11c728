"""Spaces of round-robin allocation: the batch and N_D, at several numbers of encoding micro-batches."""

import math

from xcore.policies.rra import TRAITS
from xcore.specs.workload import LengthDistribution
from xscheduler.search_problem import SearchProblem
from xscheduler.space import Variable
from xscheduler.spaces.grids import batches_of, encode_counts, enumerated, grid, pipelines
from xscheduler.spaces.policy_space import PolicySpace, Spaces


def iteration_counts(output: LengthDistribution, longest: int) -> tuple[int, ...]:
    """Return the values of N_D to search, falling.

    They are all values up to 64, and beyond that steps of 3 %. In addition, for every j, the lowest N_D that completes
    a query of the bound's length, `longest`, in j phases.
    """
    counts = {*range(1, 65), output.max}
    counts.update(int(64 * 1.03**k) for k in range(1, math.ceil(math.log(max(output.max, 65) / 64, 1.03))))
    counts.update(-(-(longest - 1) // phases) for phases in range(1, longest // 64 + 1))
    return tuple(sorted((n for n in counts if 1 <= n <= output.max), reverse=True))


def _spaces(policy: str, problem: SearchProblem) -> Spaces:
    values = iteration_counts(problem.load.steps, problem.longest)
    counts = enumerated(problem, "decode_iterations", values)
    for layout in pipelines(problem, uniform=False):
        scenario = problem.both(layout)
        bounds = problem.phased_bounds(layout, interleaved=True)
        batches, smooth = batches_of(problem, scenario), problem.cost_model.profile.source != "measured"
        for values in _by_drain(counts, len(layout.degrees)):
            variables = (batches, Variable("decode_iterations", values, smooth))
            for encode_count in encode_counts(problem, layout):
                yield grid(policy, problem, layout, variables, bounds, encode_micro_batches=encode_count)


def _by_drain(counts: tuple[int, ...], stages: int) -> tuple[tuple[int, ...], ...]:
    """Group the values of N_D so that throughput rises within each group.

    A pipeline drains at the end of a phase. If a phase has at most as many iterations as there are stages, the drain
    costs more than a fuller batch gains.
    """
    if stages == 1:
        return (counts,)
    long = tuple(n for n in counts if n > stages)
    return (*((long,) if long else ()), *((n,) for n in counts if n <= stages))


SPACE = PolicySpace(TRAITS.name, _spaces)
