"""Fluid rate: about the highest requests/s of a replica in a steady state, in a millisecond and without a search.

With b residents, b / E[D] prompts enter in each iteration, where E[D] is the mean number of iterations of a request.
They are prefilled in every iteration, or in large batches now and then, whichever takes less time. The largest b within
memory and bounds then gives the rate. It ignores waiting and the bubbles of a pipeline, so a rate that a schedule
sustains is hardly ever higher (docs/theory.md).
"""

import numpy as np

from xcore.arrays import Array
from xscheduler import ceilings
from xscheduler.allocation import Layout
from xscheduler.search_problem import SearchProblem
from xsimulator.cost.group import Group, PartSeconds

_RESIDENTS = np.geomspace(1.0, 4096.0, 417)
_BATCH = 64.0
"""Prompts that are prefilled together: far more tokens than the weights need to be read for."""


def fluid_rate(problem: SearchProblem, layout: Layout, tpot_s: float | None = None) -> float:
    """Return the requests/s of one replica within the bounds; 0 if memory holds no request, or none is in time.

    Args:
        problem: The model, the devices and the bound on the latency.
        layout: The stages of a replica.
        tpot_s: The bound on the time per output token.
    """
    scenario, load, latency_s = problem.both(layout), problem.load, problem.limits.latency_s
    fit = ceilings.residents_that_fit(scenario.replica, load)
    if fit < 1:
        return 0.0
    residents = np.append(_RESIDENTS[fit > _RESIDENTS], fit)
    mean, longest = problem.needs
    entering = max(mean, 1.0)
    iteration = _iteration(problem, layout, residents / len(layout.degrees), entering)
    within = np.ones(len(residents), dtype=bool)
    if latency_s is not None:
        within &= longest * iteration <= latency_s
    if tpot_s is not None:
        within &= iteration / problem.load.growth <= tpot_s
    rate: Array = residents / (entering * iteration)
    return float(rate[within].max(initial=0.0))


def _iteration(problem: SearchProblem, layout: Layout, batch: Array, entering: float) -> Array:
    """Return the seconds of an iteration, for micro-batches of `batch` residents on each stage."""
    side, load = problem.both(layout).replica.decode, problem.load
    batch, stages = np.maximum(batch, 1.0), len(layout.degrees)
    prompts = batch / entering
    tokens = prompts * load.prompts.mean

    def mixed(group: Group) -> PartSeconds:
        attention = prompts * group.prompt_attention(1.0, load.prompts.mean)
        return group.mixed(tokens, prompts, batch, load.resident_context, attention, prompts)

    together = side.each(lambda group: load.prompts.encode(group, _BATCH)) / _BATCH
    apart = side.decode(batch, load.resident_context) + prompts[:, None] * together
    cells = np.minimum(side.each(mixed), apart)
    hops = side.hops_of(side.rows * batch + tokens).sum(axis=-1)
    seconds: Array = np.maximum(cells.sum(axis=-1) + hops, stages * cells.max(axis=-1))
    return seconds
