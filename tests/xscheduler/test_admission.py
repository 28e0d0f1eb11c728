"""The rule of admission as a variable of the search: where memory is short, growing has more sequences resident."""

import functools
from dataclasses import replace

import pytest

from xcore.errors import InputError
from xcore.policies import TRAITS
from xcore.quantity import figure_text
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import parse_cluster
from xcore.specs.request_times import steady_tokens_s
from xcore.specs.workload import Workload, task
from xprofiler.roofline import roofline_profile
from xscheduler.tune import tune
from xsimulator import estimate
from xsimulator.replay.event_simulator import replay

OPT, T5, ONE = builtin_model("opt-13b"), builtin_model("t5-3b"), parse_cluster("1xA40")
PROFILE = roofline_profile(OPT, ONE, overhead_s=2e-3)
REQUESTS = task("T").draw(2000, seed=1)
WORKLOAD = Workload.from_requests("T", REQUESTS).without_requests
BOTH = ("reserve", "grow")


@functools.cache
def tuned(*admission, method="bnb", policies=("orca", "chunked"), **how):
    return tune(OPT, ONE, WORKLOAD, PROFILE, policies=policies, method=method, admission=admission, **how)


@pytest.mark.parametrize(
    ("admission", "bound_s", "policies"),
    [
        (("grow",), 20.0, ("orca",)),
        pytest.param(("grow",), 20.0, ("chunked",), marks=pytest.mark.slow),
        pytest.param(BOTH, None, ("orca", "chunked"), marks=pytest.mark.slow),
    ],
)
def test_branch_and_bound_agrees_with_the_exhaustive_search(admission, bound_s, policies):
    found, oracle = (
        tuned(*admission, method=m, latency_bound_s=bound_s, policies=policies) for m in ("bnb", "exhaustive")
    )
    assert [a.schedule for a in found.alternatives] == [a.schedule for a in oracle.alternatives]
    assert found.search.evaluations < 0.1 * oracle.search.evaluations == 0.1 * oracle.search.space


def test_it_is_what_the_event_simulator_makes_of_it():
    found, reserved = tuned(*BOTH), tuned("reserve")
    assert (found.schedule.admission, reserved.schedule.admission) == ("grow", "reserve")
    assert found.estimate.throughput_tok_s > 1.1 * reserved.estimate.throughput_tok_s
    assert found.schedule.control.max_num_seqs > 1.3 * reserved.schedule.control.max_num_seqs
    assert max(found.estimate.memory_bytes) <= ONE.device.memory_bytes * ONE.memory_fraction
    assert replace(estimate(found.schedule, PROFILE), binding=found.estimate.binding) == found.estimate
    run = replay(found.schedule, PROFILE, REQUESTS, timeline=False)
    assert found.estimate.throughput_tok_s == pytest.approx(steady_tokens_s(run.served), rel=0.03)
    assert run.preemptions / len(REQUESTS) < 0.1
    assert any(
        f"preempted {figure_text(found.estimate.preemptions_per_request)} times" in text for text in found.assumptions
    )


def test_a_policy_reserves_where_growing_brings_no_more():
    """A bound on latency, not memory, limits the batch."""
    for alternative in tuned(*BOTH, latency_bound_s=18.0).alternatives:
        assert alternative.schedule.admission == "reserve"
        assert estimate(replace(alternative.schedule, admission="grow"), PROFILE).feasible


def test_reserving_is_the_default():
    how = {"policies": ("chunked",), "fixed": {"max_num_batched_tokens": 512}}
    assert tune(OPT, ONE, WORKLOAD, PROFILE, **how).schedule.admission == "reserve"


def test_who_has_no_formula_for_it_says_so():
    assert TRAITS["rra"].grows
    policies = ("chunked", "rra")
    both = tune(OPT, ONE, WORKLOAD, PROFILE, policies=policies, admission=BOTH)
    assert (
        "admission grow is not searched for rra: it has no steady-state formula with these policies" in both.assumptions
    )
    assert {a.policy: a.schedule.admission for a in both.alternatives} == {"chunked": "grow", "rra": "reserve"}
    grow = tune(OPT, ONE, WORKLOAD, PROFILE, policies=policies, admission=("grow",))
    assert grow.alternatives[1].schedule is None
    assert grow.alternatives[1].reason == "it has no steady-state formula for admission grow"
    with pytest.raises(InputError, match="Admission 'grow' has no steady-state formula for rra: use"):
        tune(OPT, ONE, WORKLOAD, PROFILE, policies=("rra",), admission=("grow",))


def test_an_encoder_decoder_grows_too():
    asked = (T5, ONE, task("G"), roofline_profile(T5, ONE, overhead_s=2e-3))
    reserve, grow = (tune(*asked, policies=("orca",), fixed={"max_num_seqs": 64}, admission=(rule,)) for rule in BOTH)
    assert grow.schedule.kv_blocks < 0.75 * reserve.schedule.kv_blocks
    assert grow.estimate.throughput_tok_s == pytest.approx(reserve.estimate.throughput_tok_s, rel=0.02)
