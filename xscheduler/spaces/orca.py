"""Spaces of iteration-level scheduling: the residents, at several numbers of prompts per iteration."""

import itertools

from xcore.policies.orca import TRAITS
from xscheduler.candidates import Candidates
from xscheduler.search_problem import SearchProblem
from xscheduler.space import Variable
from xscheduler.spaces.grids import at_value, enumerated, grid, pipelines, residents_of
from xscheduler.spaces.policy_space import PolicySpace, Spaces
from xsimulator.steady import lockstep

PREFILLS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Prompts per iteration that Orca's spaces enumerate, up to the number of sequences."""
FINE_PREFILLS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Prompts per iteration for an open system, where prompts arrive in bursts."""


def _spaces(policy: str, problem: SearchProblem) -> Spaces:
    for layout, rule in itertools.product(pipelines(problem, uniform=True), problem.admissions(policy)):
        batches = residents_of(problem, problem.both(layout), rule)
        bounds = problem.mixed_bounds(layout, rule, splits=False)
        if problem.open_system:
            counts = sorted({*FINE_PREFILLS, *PREFILLS, batches.values[-1]}) if problem.finite else FINE_PREFILLS
            prefills_too = Variable("prefills_per_step", enumerated(problem, "prefills_per_step", tuple(counts)))
            yield grid(policy, problem, layout, (batches, prefills_too), bounds, grows=rule == "grow")
            continue
        slack, most = lockstep.ttft_slack(problem.both(layout)), batches.values[-1]
        few = {prefills for prefills in PREFILLS if prefills <= most}
        if lockstep.in_step(problem.both(layout)):
            few.add(most)  # if all begin together, no prompt interrupts the decoding of others
        for prefills in enumerated(problem, "prefills_per_step", tuple(sorted(few))):
            constants = {"prefills_per_step": prefills, "grows": rule == "grow"}
            yield grid(policy, problem, layout, (batches,), bounds, slack, **constants)


def _at_value(problem: SearchProblem, like: Candidates, value: int) -> Candidates | None:
    """Return the space at another number of prompts; None if it exceeds the residents."""
    if value > like.variables[0].values[-1]:
        return None
    return at_value(problem, "prefills_per_step", like, value)


SPACE = PolicySpace(TRAITS.name, _spaces, "prefills_per_step", _at_value)
