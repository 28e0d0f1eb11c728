"""A short search from the best schedule of a similar problem; its result is a lower bound on the best throughput."""

import time
from dataclasses import dataclass, replace
from functools import partial

from xcore.specs.schedule import Schedule
from xscheduler.bnb import branch_and_bound
from xscheduler.candidates import CandidateFamily, Candidates
from xscheduler.refine import around
from xscheduler.search import Search, SearchResult
from xscheduler.search_problem import SearchProblem
from xscheduler.space import Incumbent, Space, made_spaces
from xscheduler.spaces import at_value, refined_variable, spaces

Members = list[Candidates | CandidateFamily]

_SLACK = 1e-3
"""Share by which points may be below the floor that better ones are looked for around."""
_STEPS = (1.2,)
"""Ratio of neighbouring values of the refined variable, as `refine.STEPS`."""


@dataclass(frozen=True)
class Nearby:
    """The start and the length of a short search, of one policy."""

    schedule: Schedule
    """The best schedule of a similar problem: its allocation is searched first."""
    evaluations: int
    """About the most evaluations, before a refined variable is varied."""


def search_near(problem: SearchProblem, tolerance: float, floor: float, near: Nearby) -> SearchResult:
    """Return the best point that a short search finds, if its throughput exceeds the floor.

    First, only the batch and the allocation vary. Then all variables vary, beginning with the schedule's allocation. A
    refined variable keeps the schedule's value until the end, and is then varied around the best point.
    """
    started, incumbent, schedule = time.perf_counter(), Incumbent(floor * (1 - _SLACK)), near.schedule
    policy, name = schedule.policy, refined_variable(schedule.policy, problem)
    value, members = schedule.control.variables.get(name or ""), spaces(policy, problem)
    batches, everything = _with_own_variables(members, problem, schedule), list(members)
    if value is not None:
        batches, everything = [], _at_own_value(members, name or "", value, problem, schedule)
    own = [s for s in everything if isinstance(s, Candidates) and s.where.replica.stages == schedule.stages]
    looked_at, left = set[Space](), near.evaluations
    for tried in (batches, own, everything):
        known = sum(len(space.known) for space in made_spaces(tried))
        branch_and_bound(tried, tolerance, incumbent, left)
        left += known - sum(len(space.known) for space in made_spaces(tried))
        looked_at |= {*made_spaces(tried)}
    if value is not None and incumbent.space:
        values = [max(1, value // 4), max(1, value // 2), value, 2 * value]
        looked_at |= {*around(incumbent, values, name or "", partial(at_value, problem), _STEPS)}
    evaluations, size = sum(len(space.known) for space in looked_at), sum(member.size for member in members)
    cost = Search("bnb", evaluations, size, time.perf_counter() - started)
    if incumbent.throughput <= floor:
        return SearchResult(None, (), 0.0, cost)
    return SearchResult(incumbent.space, incumbent.point, incumbent.throughput, cost)


def _with_own_variables(members: Members, problem: SearchProblem, schedule: Schedule) -> Members:
    """Return the spaces in which all variables but the batch have a schedule's values; empty if there is no other."""
    variables = schedule.control.variables
    names = [
        variable.name for space in members[:1] if isinstance(space, Candidates) for variable in space.variables[1:]
    ]
    fixed = {name: value for name in names if (value := variables.get(name)) is not None}
    return spaces(schedule.policy, replace(problem, fixed=problem.fixed | fixed)) if fixed else []


def _at_own_value(members: Members, name: str, value: int, problem: SearchProblem, schedule: Schedule) -> Members:
    """Return each allocation's space at a value of a variable, and with the schedule's other variables."""
    own, kept = schedule.control.variables, dict[object, Candidates]()
    for space in members:
        assert isinstance(space, Candidates), "policies with families refine nothing"
        if all(own.get(key, constant) == constant for key, constant in space.constants.items() if key != name):
            kept.setdefault(space.where, space)
    at_own = (at_value(problem, space, value) for space in kept.values())
    return [space for space in at_own if space]
