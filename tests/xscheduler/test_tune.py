"""Tuning: the bound is kept, the oracle agrees, every policy is answered for, and the answer can be run."""

import functools
import gc
import math
import re

import pytest

from tests.xcore.small_specs import MODEL, profile, schedule
from tests.xscheduler.test_search import line
from xcore.document import from_dict, to_dict
from xcore.errors import InputError
from xcore.specs.bound import ALL_REQUESTS, PAPER_BOUND, BoundMeaning
from xcore.specs.builtin_models import builtin_model
from xcore.specs.cluster import ClusterSpec, parse_cluster
from xcore.specs.estimate import Estimate
from xcore.specs.schedule import Schedule
from xcore.specs.workload import Workload, task
from xprofiler.roofline import roofline_profile
from xscheduler import tune as tuning
from xscheduler import why_infeasible
from xscheduler.candidates import CandidateFamily, Candidates
from xscheduler.relaxation import Gain
from xscheduler.search_problem import Limits
from xscheduler.ties import TIE, preferred
from xscheduler.tune import (
    POLICIES,
    SLACK,
    _binding,
    _compared,
    _leanest,
    _plainest,
    check_asked,
    tune,
    uncollected,
)
from xscheduler.tuned import Alternative
from xscheduler.why_infeasible import lowest_latency_of
from xsimulator import estimate
from xsimulator.replay.event_simulator import replay

OPT = builtin_model("opt-13b")
A40 = parse_cluster("4xA40")
ROOFLINE = roofline_profile(OPT, A40)
ONE = parse_cluster("1xA40")
SHORT = Workload.from_requests("short", task("S").scaled_to(64)[0].draw(200, seed=3)).without_requests


@functools.cache
def answer(bound_s=5.9, name="S", **how):
    return tune(OPT, A40, task(name), ROOFLINE, latency_bound_s=bound_s, **how)


@pytest.mark.parametrize("bound_s", [2.0, 5.9, pytest.param(20.0, marks=pytest.mark.slow), None])
def test_every_schedule_keeps_its_bound_and_is_what_it_says(bound_s):
    found = answer(bound_s)
    assert [a.policy for a in found.alternatives] == list(POLICIES)
    for other in found.alternatives:
        if not other.schedule:  # two sides and a KV transfer take WAA longer than this
            assert (bound_s, other.policy[:3]) == (2.0, "waa")
            continue
        assert other.schedule.policy == other.policy
        assert other.schedule.latency_bound_s == bound_s
        assert other.estimate.feasible
        if bound_s is not None:
            assert other.estimate.latency_s <= bound_s
        again = estimate(other.schedule, ROOFLINE)
        assert again.latency_s == pytest.approx(other.estimate.latency_s)
        assert again.throughput_tok_s == pytest.approx(other.estimate.throughput_tok_s)
        assert max(again.memory_bytes) <= A40.device.memory_bytes * A40.memory_fraction
        assert from_dict(Schedule, to_dict(other.schedule), "a schedule") == other.schedule
    best = max(a.estimate.throughput_tok_s for a in found.alternatives if a.estimate)
    assert found.estimate.throughput_tok_s >= best * (1 - TIE)
    assert sum(a.reason.startswith("the best") for a in found.alternatives) == 1


def test_a_looser_bound_is_never_slower():
    reached = [answer(bound).estimate.throughput_tok_s for bound in (2.0, 5.9, None)]
    assert reached == sorted(reached)


@pytest.mark.parametrize("fixed", [{"encode_batch": 1}, {"encode_batch": 4}, {"encode_batch": 9}])
@pytest.mark.parametrize("bound_s", [0.05, 0.1, 0.4])
def test_agrees_with_the_exhaustive_search(bound_s, fixed):
    """Along one variable of a small workload, every value of which can be simulated."""
    bnb, oracle = (
        tune(
            MODEL,
            ONE,
            SHORT,
            profile(),
            latency_bound_s=bound_s,
            policies=("rra", "static"),
            fixed=fixed,
            method=method,
        )
        for method in ("bnb", "exhaustive")
    )
    for a, b in zip(bnb.alternatives, oracle.alternatives, strict=True):
        assert (a.estimate is None) == (b.estimate is None)
        if a.estimate:
            assert a.estimate.throughput_tok_s >= 0.99 * b.estimate.throughput_tok_s
    assert bnb.search.evaluations <= oracle.search.evaluations == oracle.search.space


def test_a_bound_that_nothing_meets_names_the_lowest_latency():
    found = answer(0.2)
    assert found.schedule is None
    assert found.estimate is None
    assert found.lowest_latency_s > 0.2
    for other in found.alternatives:
        assert other.schedule is None
        assert "over 200 ms" in other.reason
    met = answer(found.lowest_latency_s)
    assert met.estimate.latency_s == pytest.approx(found.lowest_latency_s)
    assert answer(found.lowest_latency_s * (1 - 1e-9)).schedule is None
    assert met.lowest_latency_s is None, "a search that finds a schedule doesn't look for it unasked"
    assert answer(found.lowest_latency_s, lowest_latency=True).lowest_latency_s == found.lowest_latency_s


def test_a_model_too_large_for_the_devices_says_so():
    tiny = ClusterSpec("tiny", 1, 1, A40.device, A40.intra, A40.inter, memory_fraction=0.2887)
    found = tune(OPT, tiny, task("S"), roofline_profile(OPT, tiny))
    assert found.schedule is None
    assert found.lowest_latency_s is None
    reasons = {a.policy: a.reason for a in found.alternatives}
    assert all("two devices" in reasons.pop(policy) for policy in ("waa-c", "waa-m"))
    weights, room = 2 * OPT.parameters / 2**30, 0.2887 * A40.device.memory_bytes / 2**30
    assert set(reasons.values()) == {
        f"its weights of {weights:.4g} GiB in fp16 leave no space for one sequence in the {room:.4g} usable GiB of tiny"
    }


@pytest.mark.parametrize(("bound", "value"), [("ttft_s", 0.15), ("tpot_s", 0.02)])
def test_first_token_and_per_token_bounds_hold(bound, value):
    found = answer(None, **{bound: value})
    key = bound.replace("_s", "_p99_s")
    assert found.schedule
    for other in found.alternatives:
        if other.estimate:
            assert getattr(other.estimate, key) <= value
    assert found.estimate.throughput_tok_s < answer(None).estimate.throughput_tok_s


def test_what_limits_is_named():
    assert {a.estimate.binding for a in answer(5.9).alternatives} & {"latency"}
    assert "memory" in {a.estimate.binding for a in answer(None).alternatives}


@pytest.mark.parametrize("policy", ["static", "orca", "chunked", "rra"])
def test_decoding_limits_nothing_where_outputs_have_one_token(policy):
    (one_token,) = tune(MODEL, ONE, Workload.fixed(1, 1), profile(), policies=(policy,)).alternatives
    assert one_token.estimate.binding in ("encoding", "memory")


def test_variables_can_be_fixed_by_hand():
    found = answer(20.0, policies=("rra",), fixed=FrozenDict(decode_iterations=7, tp_degree=4))
    assert found.schedule.control.decode_iterations == 7
    assert found.schedule.tensor_parallelism["tp_degree"] == 4
    assert found.estimate.throughput_tok_s <= answer(20.0, policies=("rra",)).estimate.throughput_tok_s


class FrozenDict(dict):
    """A dict that a cache can have as its key."""

    def __hash__(self):
        return hash(tuple(sorted(self.items())))


def test_sequences_decoded_at_once_can_be_capped():
    schedules = [other.schedule for other in answer(None, most_resident=20).alternatives if other.schedule]
    assert len(schedules) > 4
    for s in schedules:
        assert max(s.control.batch, s.control.of_kind("target") or 0) <= 20


def test_a_measured_profile_is_not_trusted_beyond_its_batches():
    widest = profile().degrees[0].decoder.decode_attention.points[0][-1]
    found = tune(MODEL, ONE, SHORT, profile(), policies=("orca",))
    assert found.schedule.control.max_num_seqs <= widest


def test_the_winner_runs_as_predicted():
    """The schedule as the scheduler wrote it, its own KV blocks included, over requests of its own workload."""
    found = answer(5.9)
    workload = task("S")
    for other in found.alternatives:
        run = replay(other.schedule, ROOFLINE, workload.draw(30, seed=2))
        assert len(run.served) == 30
        slowest = max(s.finish_s - s.start_s for s in run.served)
        assert slowest <= 5.9 * workload.output.max / workload.p99_output


def test_bad_requests_are_refused_in_a_sentence():
    with pytest.raises(InputError, match="Policy 'waa' can't be searched"):
        answer(policies=("waa",))
    with pytest.raises(InputError, match="kv_blocks can't be fixed"):
        answer(fixed=FrozenDict(kv_blocks=2))
    with pytest.raises(InputError, match="fixed to 0"):
        answer(fixed=FrozenDict(encode_batch=0))
    with pytest.raises(InputError, match="A budget of 128 tokens per iteration is too small for 512 sequences"):
        answer(policies=("chunked",), fixed=FrozenDict(max_num_seqs=512, max_num_batched_tokens=128))
    with pytest.raises(InputError, match="search method"):
        answer(method="guess")


def test_optuna_is_feasible_and_not_better():
    found = answer(5.9, policies=("static",), method="optuna")
    assert found.estimate.latency_s <= 5.9
    oracle = answer(5.9, policies=("static",), method="bnb")
    assert found.estimate.throughput_tok_s <= oracle.estimate.throughput_tok_s
    assert math.isfinite(found.search.seconds)


def test_a_bound_for_fewer_requests_gives_more():
    percentiles = (50.0, 90.0, 99.0, 99.9)
    how = {"policies": ("rra",), "fixed": FrozenDict(tp_degree=4)}
    found = [answer(3.1, bound=BoundMeaning(percentile=p), **how) for p in percentiles]
    assert all(a.estimate.latency_s <= 3.1 for a in found)
    rates = [a.estimate.throughput_tok_s for a in found]
    assert rates == sorted(rates, reverse=True) and rates[0] > 1.05 * rates[-1]
    assert [a.schedule.percentile for a in found] == list(percentiles)
    tokens = answer(None, ttft_s=1.0, tpot_s=0.2, bound=BoundMeaning(percentile=90.0), **how)
    assert (tokens.schedule.ttft_bound_s, tokens.schedule.tpot_bound_s) == (1.0, 0.2)
    assert tokens.estimate.ttft_bounded_s <= 1.0 and tokens.estimate.tpot_bounded_s <= 0.2


def test_an_allocation_that_can_not_be_is_told_from_a_lack_of_memory():
    found = tune(OPT, A40, task("S"), ROOFLINE, policies=("rra",), fixed={"tp_degree": 64})
    assert found.schedule is None
    assert found.alternatives[0].reason == "no allocation of its 4 devices has the requested values (tp_degree=64)"


def test_progress_is_told_before_every_policy():
    from xscheduler.settings import find_setting

    setting, told = find_setting("opt-13b", "1xA40", "S"), []
    policies = ("orca", "static", "chunked")
    tune(
        setting.model,
        setting.cluster,
        setting.workload,
        setting.profile,
        policies=policies,
        progress=lambda *at: told.append(at),
    )
    assert told == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize(
    ("throughputs", "batch"),
    [
        ([1.0, 2.0, 3.0, 4.0], 3),
        ([1.0, 2.0, 4.0, 4.0], 2),
        ([1.0, 4.0 * (1 - SLACK), 4.0, 4.0], 1),
        ([1.0, 4.0 * (1 - 1.01 * SLACK), 4.0, 4.0], 2),
        ([5.0] * 4, 0),
    ],
)
def test_the_smallest_batch_with_as_good_as_the_throughput_is_taken(throughputs, batch):
    assert _leanest(line(throughputs, range(4), limit=9), (3,)) == (batch,)


@pytest.mark.parametrize(
    ("rivals", "taken"),
    [
        ([("reserve", 8192, 10.0), ("reserve", 2048, 9.0)], ("reserve", 8192)),
        ([("reserve", 8192, 10.0), ("reserve", 2048, 10.0)], ("reserve", 2048)),
        ([("reserve", 2048, 10.0 * (1 - SLACK))], ("reserve", 2048)),
        ([("reserve", 2048, 10.0 * (1 - 1.01 * SLACK))], ("grow", 4096)),
        ([("grow", 2048, 10.0), ("grow", 8192, 10.0)], ("grow", 2048)),
    ],
)
def test_of_as_good_spaces_the_one_that_reserves_with_the_smallest_budget_is_taken(rivals, taken):
    def scenario():
        return None

    def space(rule, budget, throughput):
        constants = {"grows": rule == "grow", "max_num_batched_tokens": budget}
        shape = line([throughput] * 4, range(4), limit=9)
        what = {"policy": "chunked", "scenario": scenario, "constants": constants}
        return Candidates("", shape.variables, shape.constraints, shape.simulate, **what)

    best = space("grow", 4096, 10.0)
    found, point = _plainest([best, *(space(*rival) for rival in rivals)], best, (2,))
    rule, budget = taken
    assert found.constants == {"grows": rule == "grow", "max_num_batched_tokens": budget}
    assert point == (2,)


def alternative(policy, tokens, reason):
    """A policy's answer with so many tokens a second."""
    if tokens is None:
        return Alternative(policy, None, None, reason)
    figures = Estimate(tokens / 10, tokens, 1.0, 1.0, 1.0, 0.1, 0.02, 0.1, 0.02, utilisation=(0.5,))
    return Alternative(policy, schedule(policy), figures, reason)


def test_every_policy_is_told_apart_from_the_best_by_its_share():
    best, good = alternative("orca", 100.0, "full"), alternative("chunked", 99.6, "late")
    slow, none = alternative("rra", 75.0, "wide"), alternative("static", None, "too large")
    told = {a.policy: (a.reason, a.clause) for a in _compared((none, slow, best, good), best)}
    assert told["orca"] == ("the best; chunked is equally good; full", "full")
    assert told["chunked"] == ("equal to orca; late", "equal to orca")
    assert told["static"] == ("too large", "")
    fewer = "about 1.35 sequences are decoded at a time instead of 1.8 in the best (25% fewer)"
    together = "prefill and decode read the weights one after the other, but the best schedule reads them once for both"
    assert told["rra"] == (
        f"75% of orca's throughput: {fewer}; {together}; wide",
        f"75% of orca's throughput: {fewer}",
    )
    (behind, ahead) = _compared((slow, best), best)
    assert ahead.reason == "the best; the next policy, rra, reaches 75% of its throughput; full"
    assert behind.clause == told["rra"][1]
    assert _compared((none, best), best)[1].reason == "the best; full"


@pytest.mark.parametrize(
    ("raised", "binding"),
    [("latency", "latency"), ("ttft", "latency"), ("tpot", "latency"), ("memory", "memory"), ("resident", "compute")],
)
def test_what_gains_most_limits(raised, binding):
    assert _binding(Gain(raised, 1.0, 0.1), "compute") == binding
    assert _binding(None, "compute") == "compute"


@pytest.mark.parametrize("enabled", [True, False])
def test_a_search_leaves_the_garbage_collector_as_it_was(enabled):
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ZeroDivisionError), uncollected():
            assert not gc.isenabled()
            raise ZeroDivisionError
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_the_lowest_latency_is_looked_for_where_it_may_be_lower(monkeypatch):
    latency, asked = {"a": 3.0, "b": 2.5, "c": math.inf, "d": 0.0, "inner": 2.0, "outer": 9.0}, []
    monkeypatch.setattr(why_infeasible, "_latency_of_lowest", lambda s, limits: asked.append(s.name) or latency[s.name])

    def space(name, quickest_s):
        return Candidates(name, (), (), lambda at: None, quickest_s=quickest_s)

    family = CandidateFamily("family", 1.0, 2, lambda: [space("outer", 2.4), space("inner", 1.5)], quickest_s=1.5)
    members = [space("d", 2.0), space("a", 1.0), space("c", 0.5), space("b", 1.2), family]
    assert lowest_latency_of(members, None) == 2.0
    assert asked == ["c", "a", "b", "inner"], "the others can't be quicker than what was found"
    assert lowest_latency_of([], None) == math.inf == lowest_latency_of([space("c", 0.5)], None)


def test_why_nothing_is_feasible_is_said():
    t5 = builtin_model("t5-3b")
    chunks = tune(t5, ONE, task("S"), roofline_profile(t5, ONE), policies=("chunked",)).alternatives[0].reason
    assert chunks == "its encoder reads a whole prompt at once, so prompts can't be split into chunks"
    for bound, name in (("ttft_s", "time to first token"), ("tpot_s", "time per output token")):
        (orca,) = answer(None, policies=("orca",), **{bound: 1e-4}).alternatives
        assert re.fullmatch(rf"its lowest {name} is [\d.]+ ms, over 0.1 ms", orca.reason)
    (full,) = tune(MODEL, ONE, SHORT, profile(), policies=("orca",), kv_blocks=1).alternatives
    assert full.reason == "not even one sequence fits in memory besides the weights"


def test_unless_asked_otherwise_the_search_is_exact_and_over_everything(monkeypatch):
    """Latencies allow for variation, bounds are of all requests, partial tensor parallelism is tried; no more is."""
    asked = []
    monkeypatch.setattr(tuning, "_answer", lambda *how: asked.append(how))
    tune(MODEL, ONE, SHORT, profile(), latency_bound_s=2.0)
    tune(MODEL, ONE, SHORT, profile(), latency_bound_s=2.0, bound=PAPER_BOUND)
    tune(MODEL, ONE, SHORT, profile(), latency_bound_s=2.0, variation=False, partial=False)
    (problems, method, tolerance, lowest, _), *others = asked
    (problem,), (length,), (paper,) = (found["orca"] for found in (problems, *(other[0] for other in others)))
    assert (tuple(problems), method, tolerance, lowest) == (POLICIES, "bnb", 0.0, False)
    assert len({id(asked) for (asked,) in problems.values()}) == 1, "one engine, one problem"
    assert problem.variation and problem.partial and not problem.open_system
    assert problem.admission == ("reserve",) and problem.encode_micro_batches == (1, 2, 4)
    assert problem.limits == length.limits == Limits(2.0)
    assert problem.bound == ALL_REQUESTS and length.bound == PAPER_BOUND
    assert not paper.variation and not paper.partial
    assert not problem.cost_model.watched, "no list of what was extrapolated for each of thousands of points"


def test_what_is_fixed_is_at_least_one():
    check_asked(("rra",), {"encode_batch": 1})
    with pytest.raises(InputError, match="fixed to 0"):
        check_asked(("rra",), {"encode_batch": 0})
    check_asked(("orca", "rra"), {}, ("grow",))
    with pytest.raises(InputError, match="formula for static, rra: use --admission reserve, or one of orca, chunked"):
        check_asked(("static", "rra"), {}, ("grow",))


@pytest.mark.parametrize("bound", [PAPER_BOUND, ALL_REQUESTS])
def test_what_was_assumed_is_said(bound):
    how = {"bound": bound, "policies": ("orca",), "fixed": {"max_num_seqs": 4}}
    found = tune(MODEL, ONE, SHORT, profile(), latency_bound_s=2.0, **how).assumptions
    who = "a sequence of the 99th-percentile output length" if bound.of_length else "99% of all requests"
    assert found[0] == f"bound: it holds for {who}, counted from the start of the prefill"
    free = tune(MODEL, ONE, SHORT, profile(), admission=("reserve", "grow"), **how).assumptions
    assert not any("bound:" in text or "isn't searched" in text for text in free)


def test_what_may_be_the_answer_by_a_tie_is_told_to_be_as_good():
    """To the last bit: `preferred` takes it where it is simpler."""
    best, other = alternative("rra", 200.0, "full"), alternative("orca", 199.0, "late")
    assert preferred([best, other], lambda a: a.estimate.throughput_tok_s, lambda a: a.policy) is other
    ahead, behind = _compared((best, other), best)
    assert ahead.reason == "the best; orca is equally good; full" and behind.reason == "equal to rra; late"


def test_lengths_vary_unless_they_are_said_not_to():
    """By the latency: requests that vary wait longer for each other."""
    usual, varied, alike = (
        tune(MODEL, ONE, SHORT, profile(), policies=("static",), **how).estimate
        for how in ({}, {"variation": True}, {"variation": False})
    )
    assert usual == varied and alike.latency_s != varied.latency_s
