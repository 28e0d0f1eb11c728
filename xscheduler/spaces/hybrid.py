"""Spaces of hybrid static batches: the batch, at several numbers of encoding and of decoding micro-batches."""

from xcore.policies.hybrid import TRAITS
from xscheduler.candidates import Candidates
from xscheduler.question import Question
from xscheduler.spaces.grids import at_value, batches_of, encode_counts, enumerated, grid, pipelines
from xscheduler.spaces.policy_space import PolicySpace, Spaces


def _spaces(policy: str, question: Question) -> Spaces:
    for layout in pipelines(question, uniform=True):
        scenario, stages = question.both(layout), len(layout.degrees)
        for encode_count in encode_counts(question, layout):
            for parts in enumerated(question, "micro_batches", tuple(sorted({1, -(-stages // 2), stages}))):
                batches, bounds = batches_of(question, scenario), question.phased_bounds(layout)
                counts = {"encode_micro_batches": encode_count, "micro_batches": parts}
                yield grid(policy, question, layout, (batches,), bounds, **counts)


def _at_value(question: Question, like: Candidates, value: int) -> Candidates:
    return at_value(question, "encode_micro_batches", like, value)


SPACE = PolicySpace(TRAITS.name, _spaces, "encode_micro_batches", _at_value)
