"""The spaces of each policy: its control variables, their orientation, and the allocations."""

from xscheduler.candidates import CandidateFamily, Candidates
from xscheduler.search_problem import SearchProblem, variables_of
from xscheduler.spaces import chunked, hybrid, orca, rra, static, waa
from xscheduler.spaces.declared import declared

SPACES = {
    space.policy: space for space in (static.SPACE, hybrid.SPACE, orca.SPACE, chunked.SPACE, rra.SPACE, *waa.SPACES)
}
"""The spaces by the policy's name."""
POLICIES = tuple(SPACES)
"""The policies that are searched by default."""


def spaces(policy: str, problem: SearchProblem) -> list[Candidates | CandidateFamily]:
    """Return the spaces of a policy in whose scenarios the weights fit into memory."""
    possible = problem.admissions(policy) and set(problem.fixed) <= set(variables_of(policy))
    make = SPACES[policy].spaces if policy in SPACES else declared
    members = list(make(policy, problem)) if possible else []
    for number, space in enumerate(members):
        space.name = f"{policy}-{number}"
    return members


def twin(policy: str, problem: SearchProblem) -> str | None:
    """Return another policy whose spaces are the same and behave the same; None if there is none."""
    return SPACES[policy].twin(problem) if policy in SPACES else None


def refined_variable(policy: str, problem: SearchProblem) -> str | None:
    """Return the variable to refine, of which each space has one value; None if there is none or it is fixed."""
    name = SPACES[policy].refined if policy in SPACES else None
    return None if name in problem.fixed else name


def at_value(problem: SearchProblem, like: Candidates, value: int) -> Candidates | None:
    """Return the same space at another value of the refined variable; None if there is no such space."""
    make = SPACES[like.policy].at_value
    assert make is not None, f"{like.policy} refines no variable"
    return make(problem, like, value)
