"""Spaces of static batches: the batch."""

from xcore.policies.static import TRAITS
from xscheduler.question import Question
from xscheduler.spaces.grids import batches_of, grid, pipelines
from xscheduler.spaces.policy_space import PolicySpace, Spaces


def _spaces(policy: str, question: Question) -> Spaces:
    for layout in pipelines(question, uniform=True):
        batches = batches_of(question, question.both(layout))
        yield grid(policy, question, layout, (batches,), question.phased_bounds(layout))


SPACE = PolicySpace(TRAITS.name, _spaces)
