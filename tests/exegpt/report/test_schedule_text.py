"""A schedule in one line."""

from dataclasses import replace

import pytest

from tests.xcore.small_specs import changed, schedule
from xcore.console.schedule_text import bound_text, schedule_text, stages_text, variables_text
from xcore.specs.schedule import Stage


def stage(first, tp, phase="both"):
    return Stage(tuple(range(first, first + tp)), tp, phase, None, (0, 1))


@pytest.mark.parametrize(
    ("stages", "replicas", "text"),
    [
        ((stage(0, 1),), 1, "TP1"),
        ((stage(0, 4), stage(4, 4)), 1, "PP2×TP4"),
        ((stage(0, 2), stage(2, 1), stage(3, 1)), 2, "2 replicas of PP3 of TP2,2 TP1"),
        ((stage(0, 1, "encode"), stage(1, 2, "decode")), 1, "encode TP1 + decode TP2"),
    ],
)
def test_stages_in_brief(stages, replicas, text):
    policy = "waa-c" if stages[0].phase == "encode" else "rra"
    assert stages_text(schedule(policy, stages=stages, replicas=replicas)) == text


def test_only_the_variables_that_a_policy_has():
    plan = schedule("rra", decode_iterations=7, stages=(stage(0, 1),))
    assert variables_text(changed(plan, encode_micro_batches=1)) == (
        "encode_batch=4 decode_iterations=7 decode_batch=9 on TP1"
    )
    assert schedule_text(changed(plan, encode_micro_batches=2)).startswith("rra encode_batch=4 ")
    assert "encode_micro_batches=2" in variables_text(changed(plan, encode_micro_batches=2))


def test_a_bounds_text_names_what_must_meet_it():
    plan = schedule("rra")
    assert bound_text(replace(plan, latency_bound_s=4.5, bound="p99-queries")) == "4.5 s for 99% of all requests"
    assert bound_text(replace(plan, latency_bound_s=4.5, bound="p99-length")) == (
        "4.5 s for a sequence of the 99th-percentile output length"
    )
    every = replace(plan, latency_bound_s=9.0, ttft_bound_s=0.5, tpot_bound_s=0.02, bound="requests", percentile=90)
    assert bound_text(every) == "9 s for 90% of all requests, TTFT 500 ms and TPOT 20 ms for 90% of all requests"
    assert bound_text(replace(plan, latency_bound_s=None)) == "none"
