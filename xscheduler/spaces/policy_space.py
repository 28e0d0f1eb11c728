"""What each of this folder's files of a policy enters into the registry: its spaces."""

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
    """Of a policy and a question, on all allocations on which the weights fit."""
    refined: str | None = None
    """A variable of which each space has one value: `refine.py` looks between them."""
    at_value: Callable[[Question, Candidates, int], Candidates | None] | None = None
    """The space like another one at another value of that variable; None where there is none."""
