"""PolicySpace: the entry that each policy's file in this folder adds to the registry."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from xscheduler.candidates import CandidateFamily, Candidates
from xscheduler.search_problem import SearchProblem

Spaces = Iterator[Candidates | CandidateFamily]


@dataclass(frozen=True)
class PolicySpace:
    """The spaces of a policy."""

    policy: str
    spaces: Callable[[str, SearchProblem], Spaces]
    """Returns the spaces for a policy and a problem, on all allocations on which the weights fit."""
    refined: str | None = None
    """The variable of which each space has one value; `refine.py` searches between these values."""
    at_value: Callable[[SearchProblem, Candidates, int], Candidates | None] | None = None
    """Returns the same space at another value of that variable; None if there is no such space."""
    twin: Callable[[SearchProblem], str | None] = lambda problem: None
    """Returns the policy whose spaces are the same and behave the same; None if there is none."""
