"""Spaces of round-robin allocation: the batch and N_D, at some numbers of encoding micro-batches."""

import math

from xcore.policies.rra import TRAITS
from xcore.specs.workload import LengthDistribution
from xscheduler.question import Question
from xscheduler.space import Variable
from xscheduler.spaces.grids import batches_of, encode_counts, enumerated, grid, pipelines
from xscheduler.spaces.policy_space import PolicySpace, Spaces


def iteration_counts(output: LengthDistribution, longest: int) -> tuple[int, ...]:
    """Values of N_D that are looked at, falling: all up to 64, beyond that steps of 3 % and the least N_D that brings
    a query of the bound's length, `longest`, through in j phases, for every j.
    """
    counts = {*range(1, 65), output.max}
    counts.update(int(64 * 1.03**k) for k in range(1, math.ceil(math.log(max(output.max, 65) / 64, 1.03))))
    counts.update(-(-(longest - 1) // phases) for phases in range(1, longest // 64 + 1))
    return tuple(sorted((n for n in counts if 1 <= n <= output.max), reverse=True))


def _spaces(policy: str, question: Question) -> Spaces:
    values = iteration_counts(question.load.workload.output, question.longest)
    counts = enumerated(question, "decode_iterations", values)
    for layout in pipelines(question, uniform=False):
        scenario = question.both(layout)
        bounds = question.phased_bounds(layout, interleaved=True)
        batches, smooth = batches_of(question, scenario), question.cost_model.profile.source != "measured"
        for values in _by_drain(counts, len(layout.degrees)):
            variables = (batches, Variable("decode_iterations", values, smooth))
            for encode_count in encode_counts(question, layout):
                yield grid(policy, question, layout, variables, bounds, encode_micro_batches=encode_count)


def _by_drain(counts: tuple[int, ...], stages: int) -> tuple[tuple[int, ...], ...]:
    """N_D's values in the groups along which throughput rises: a pipeline drains at the end of a phase, and where a
    phase has no more iterations than there are stages, that costs more than a fuller batch gives.
    """
    if stages == 1:
        return (counts,)
    long = tuple(n for n in counts if n > stages)
    return (*((long,) if long else ()), *((n,) for n in counts if n <= stages))


SPACE = PolicySpace(TRAITS.name, _spaces)
