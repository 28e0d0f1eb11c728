"""PolicySpace: the entry that each policy's file in this folder adds to the registry."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from xscheduler.candidates import CandidateFamily, Candidates
from xscheduler.question import Question

Spaces = Iterator[Candidates | CandidateFamily]


@dataclass(frozen=True)
class PolicySpace:
    """The spaces of a policy."""

    policy: str
    spaces: Callable[[str, Question], Spaces]
    """Returns the spaces for a policy and a question, on all allocations on which the weights fit."""
    refined: str | None = None
    """The variable of which each space has one value; `refine.py` searches between these values."""
    at_value: Callable[[Question, Candidates, int], Candidates | None] | None = None
    """Returns the same space at another value of that variable; None if there is no such space."""
    twin: Callable[[Question], str | None] = lambda question: None
    """Returns the policy whose spaces are the same and behave the same; None if there is none."""
