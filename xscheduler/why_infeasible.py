"""Why no schedule of a policy keeps the constraints, and the lowest latency that any schedule reaches."""

import functools
import math
from collections.abc import Sequence

from xcore.duration import beyond_text
from xcore.errors import InputError
from xcore.policies import TRAITS
from xcore.quantity import counted, figure_text, percent_text
from xscheduler import ceilings
from xscheduler.advice import TIMES, WIDTHS, too_wide
from xscheduler.candidates import CandidateFamily, Candidates
from xscheduler.search_problem import Limits, SearchProblem, variables_of
from xsimulator.steady.outcome import latency

Members = list[Candidates | CandidateFamily]
"""A policy's spaces."""


def lowest_latency_of(members: Members, limits: Limits, lowest: float = math.inf) -> float:
    """Return the lowest latency of all spaces, at the lowest corner of a space, or `lowest` if that is lower.

    Infinite if no space fits in memory.
    """
    for member in sorted(members, key=lambda member: member.quickest_s):
        if member.quickest_s >= lowest:
            break
        if isinstance(member, CandidateFamily):
            lowest = lowest_latency_of(_of(member), limits, lowest)
        else:
            lowest = min(lowest, _latency_of_lowest(member, limits))
    return lowest


def _of(family: CandidateFamily) -> Members:
    """Return a family's spaces."""
    return [space for space in family.spaces if isinstance(space, Candidates)]


def _latency_of_lowest(space: Candidates, limits: Limits) -> float:
    result = space.with_least_memory(space.values(space.lowest))
    return latency(space.where, result) if limits.memory(space.where, result) <= 1.0 else math.inf


def why_infeasible(policy: str, members: Sequence[Candidates | CandidateFamily], problem: SearchProblem) -> str:
    """Return the constraint that makes every schedule infeasible.

    This constraint fails even at the lowest corner: for a time, the lowest corner of all spaces; for other constraints,
    that of the space with the lowest latency.
    """
    without = [name for name in problem.fixed if name not in variables_of(policy)]
    if without:
        return f"it has no {', '.join(without)}, which {'is' if len(without) == 1 else 'are'} fixed"
    if not members and problem.load.encoder_decoder and TRAITS[policy].splits_prompts:
        return "its encoder reads a whole prompt at once, so prompts can't be split into chunks"
    if not members:
        try:
            TRAITS[policy].control.check(problem.fixed, problem.cost_model.rows)
        except InputError as error:
            reason = str(error).rstrip(".")
            return reason[0].lower() + reason[1:]
    if not members and not problem.admissions(policy):
        return "it has no steady-state formula for admission grow"
    alone = problem.cost_model.cluster.devices == 1 or problem.cost_model.model.attention_dp > 1
    if not members and TRAITS[policy].disaggregated and alone:
        return "it needs at least two devices for a replica, because some encode and the others decode"
    if not members and not any(problem.layouts(n, uniform=False) for n in problem.replica_sizes()):
        asked = ", ".join(f"{name}={value}" for name, value in problem.fixed.items())
        devices = counted(problem.cost_model.cluster.devices, "device")
        return f"no allocation of its {devices} has the requested values ({asked})"
    if not members:
        return _too_large(policy, problem)
    closest = min(members, key=lambda member: member.quickest_s)
    if isinstance(closest, CandidateFamily):
        return why_infeasible(policy, _of(closest), problem)
    lowest = closest.at(closest.lowest)
    for place, constraint in enumerate(closest.constraints):
        timed = constraint.name in TIMES
        figure = _lowest_of(policy, members, place, constraint.name) if timed else lowest.figures[place]
        if figure <= constraint.limit:
            continue
        if constraint.name == "memory":
            name, least = closest.variables[0].name, closest.values(closest.lowest)[0]
            if least > 1:  # fixed by the user
                return f"{name}={least:,} needs {percent_text(figure)} of the memory"
            return "not even one sequence fits in memory besides the weights"
        if constraint.name in WIDTHS:
            return f"even its smallest batch would {too_wide(problem.widest, figure)}"
        return f"its lowest {TIMES[constraint.name]} is {beyond_text(figure, constraint.limit)}"
    return "none of its schedules fits in memory and meets all bounds"


def _lowest_of(policy: str, members: Sequence[CandidateFamily | Candidates], place: int, name: str) -> float:
    """Return the lowest figure of a time's constraint, number `place`, at the lowest corners of all spaces that fit.

    Spaces are evaluated in the order of a lower bound on this time, until no other one can be lower.
    """
    first = functools.partial(ceilings.quickest_first, splits=TRAITS[policy].splits_prompts)
    shortest = {"ttft": functools.cache(first), "tpot": functools.cache(ceilings.quickest_token)}

    def bound(space: Candidates) -> float:
        return shortest[name](space.where) if name in shortest else space.quickest_s

    lowest = math.inf
    for space in sorted((space for space in members if isinstance(space, Candidates)), key=bound):
        if bound(space) >= lowest:
            break
        figures = space.at(space.lowest).figures
        if figures[0] <= 1.0:
            lowest = min(lowest, figures[place])
    return lowest


def _too_large(policy: str, problem: SearchProblem) -> str:
    """Return the sentence that compares the weights with the memory, in GiB."""
    model, cluster, dtype = problem.cost_model.model, problem.cost_model.cluster, problem.cost_model.profile.dtype
    weights = model.checkpoint_bytes(dtype) / 2**30
    memory = cluster.devices * problem.cost_model.engine_memory.usable_bytes(cluster) / 2**30
    twice = " (each layer is stored twice)" if TRAITS[policy].disaggregated and not model.encoder_layers else ""
    return (
        f"its weights of {figure_text(weights, 4)} GiB in {dtype}{twice} leave no space for one sequence in the "
        f"{figure_text(memory, 4)} usable GiB of {cluster.name}"
    )
