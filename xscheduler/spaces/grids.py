"""Values of control variables that the spaces of several policies share, and the layouts to search."""

import functools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from xcore.batching.admission import Admission
from xscheduler import ceilings
from xscheduler.allocation import Layout
from xscheduler.candidates import Candidates, candidates
from xscheduler.ceilings import SpaceLimits
from xscheduler.search_problem import SearchProblem
from xscheduler.space import Variable
from xsimulator.steady.scenario import Scenario

MOST = 2048
"""The largest batch that is searched."""
_FLAT = 1e-9
"""Share by which rounding may change times."""


def ascending(problem: SearchProblem, name: str, most: int) -> Variable:
    """Return the variable with its fixed value, or with all values from 1 to `most`, at most `MOST`."""
    return Variable(name, (problem.fixed[name],) if name in problem.fixed else range(1, min(most, MOST) + 1))


def batches_of(problem: SearchProblem, scenario: Scenario) -> Variable:
    """Return the batches that memory might hold."""
    return ascending(problem, "encode_batch", ceilings.batch_that_fits(scenario))


def static_batches_of(problem: SearchProblem, scenario: Scenario, encode_count: int, parts: int) -> Variable:
    """Return the batches that memory might hold, with the peaks of static ones.

    They are encoded in `encode_count` micro-batches and decoded in `parts`. A larger batch has longer outputs. So
    throughput falls where a step takes nearly as much time per sequence, or more: with few tokens per expert, above a
    number of rows to which a GPU pads fewer ones, and in very large batches.
    """
    batches = batches_of(problem, scenario)
    if len(batches.values) == 1:
        return batches
    batch, side, prompts = np.array(batches.values, dtype=np.float64), scenario.replica.decode, scenario.load.prompts
    steps, context = (each[: len(batch)] for each in scenario.load.static_steps(MOST))
    counts, pieces = np.minimum(encode_count, batch), np.minimum(parts, batch)
    passes = 1.0 + (counts - 1.0) / len(side.stages)  # through all stages, one behind the other
    encode_s = passes * side.each(lambda group: prompts.encode(group, batch / counts)).sum(axis=-1)
    each_s = (encode_s + steps * side.decode(batch / pieces, context).sum(axis=-1)) / batch
    rises = np.diff(each_s) > _FLAT * each_s[:-1]
    return replace(batches, peaks=tuple(np.flatnonzero(rises & ~np.append(False, rises[:-1])).tolist()))


def residents_of(problem: SearchProblem, scenario: Scenario, admission: Admission) -> Variable:
    """Return the residents of iteration-level scheduling that memory might hold."""
    most = ceilings.batch_that_fits(scenario)
    if admission == "grow":
        most = max(most, int(ceilings.residents_that_fit(scenario.replica, scenario.load, admission)) + 1)
    return ascending(problem, "max_num_seqs", most)


def enumerated(problem: SearchProblem, name: str, values: tuple[int, ...]) -> tuple[int, ...]:
    """Return the fixed value of a variable, or `values` if it isn't fixed."""
    return (problem.fixed[name],) if name in problem.fixed else values


def pipelines(problem: SearchProblem, uniform: bool) -> Iterator[Layout]:
    """Yield the layouts of all replica sizes on which the weights fit."""
    for devices in problem.replica_sizes():
        for layout in problem.layouts(devices, uniform):
            if ceilings.residents_that_fit(problem.both(layout).replica, problem.load) >= 1:
                yield layout


def encode_counts(problem: SearchProblem, layout: Layout) -> tuple[int, ...]:
    """Return the numbers of encoding micro-batches to search: multiples of the stages, or 1 on a single stage."""
    stages = len(layout.degrees)
    if "encode_micro_batches" in problem.fixed:
        return (problem.fixed["encode_micro_batches"],)
    return tuple(stages * times for times in problem.encode_micro_batches) if stages > 1 else (1,)


def grid(
    policy: str,
    problem: SearchProblem,
    layout: Layout,
    variables: tuple[Variable, ...],
    bounds: SpaceLimits,
    ttft_slack: float = 0.0,
    **constants: int,
) -> Candidates:
    """Return the space of some variables, on stages that encode and decode."""
    where = functools.partial(problem.both, layout)
    return candidates(policy, problem, where, variables, bounds, ttft_slack, **constants)


def rule_of(space: Candidates) -> Admission:
    """Return the admission of a space's schedules."""
    return "grow" if space.constants["grows"] else "reserve"


def at_value(
    problem: SearchProblem, name: str, like: Candidates, value: int, batches: Variable | None = None
) -> Candidates:
    """Return the same space at another value of a constant, with other `batches` if they depend on it."""
    bounds = SpaceLimits(like.ceiling, like.quickest_s)
    slack = next((c.slack for c in like.constraints if c.name == "ttft"), 0.0)
    variables, constants = (batches or like.variables[0],), like.constants | {name: value}
    return candidates(like.policy, problem, lambda: like.where, variables, bounds, slack, **constants)
