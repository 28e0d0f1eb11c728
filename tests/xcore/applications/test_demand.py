"""Monte Carlo demand beside exact expectations, and refinement beside what the records say."""

import numpy as np
import pytest

from xcore.applications.demand import ApplicationDemand, Correlations, Seen, ServiceRates
from xcore.applications.demand_graph import END, DemandGraph, DemandStep, JointRecords

RATES = ServiceRates(0.001, 0.1)
SEARCH = DemandStep("search", "search", ("answer",), seconds=(2.0, 4.0))


def chain(correlated=True, records=400):
    """plan → search → answer: as many requests in parallel as were planned, and outputs that follow the plan's."""
    drawn = np.random.default_rng(0)
    outputs = drawn.integers(1, 100, records)
    answers = outputs if correlated else drawn.permutation(outputs)
    parallel = np.arange(records) % 3 + 1
    plan = DemandStep("plan", "llm", ("search",), (100,) * records, tuple(outputs.tolist()), tuple(parallel.tolist()))
    answer = DemandStep("answer", "llm", (END,), (200,) * records, tuple(answers.tolist()), tuple(parallel.tolist()))
    rows = zip([100] * records, outputs, parallel, [200] * records, answers, parallel, strict=True)
    joint = JointRecords("plan", "answer", tuple(tuple(map(int, row)) for row in rows))
    return DemandGraph(1, "kbqa", ("plan",), (plan, SEARCH, answer), (joint,))


def test_walks_reach_the_expected_demand():
    """A loop that goes on with probability 3/4 is called four times on average; parallel requests are summed in one
    measure, counted once in the other."""
    loop = DemandStep("think", "llm", ("think", "think", "think", END), (100,), (10,), (3,))
    demand = ApplicationDemand(DemandGraph(1, "react", ("think",), (loop,)), RATES, walks=20_000).prior
    call_s = 100 * 0.001 + 10 * 0.1
    assert demand.total_s.mean() == pytest.approx(4 * 3 * call_s, rel=0.03)
    assert demand.longest_s.mean() == pytest.approx(4 * call_s, rel=0.03)
    assert demand.longest_s.min() == pytest.approx(call_s)


def test_walks_end_after_fifty_calls():
    nearly_endless = DemandStep("think", "llm", (*["think"] * 999, END), (0,), (10,), (1,))
    demand = ApplicationDemand(DemandGraph(1, "react", ("think",), (nearly_endless,)), RATES).prior
    assert demand.total_s.max() == pytest.approx(50.0)


def test_names_may_be_longer_than_the_first_ones():
    units = (
        DemandStep("a", "llm", ("afterwards",), (0,), (10,), (1,)),
        DemandStep("afterwards", "x", (END,), seconds=(2.0,)),
    )
    demand = ApplicationDemand(DemandGraph(1, "b", ("a",), units), RATES).prior
    assert set(demand.total_s) == {3.0}


def test_other_backends_count_their_seconds():
    demand = ApplicationDemand(chain(), RATES)
    assert set(demand.after("plan").total_s - demand.after("plan").longest_s) != {0.0}
    assert demand.refined("search", None).longest_s.min() > 2.0


def test_only_positive_correlations_above_a_half_count():
    pair = Correlations(chain().joint[0])
    assert pair.mask == {("output", "output"), ("parallel", "parallel")}
    assert pair.rho["input", "input"] == 0.0  # it never varies
    falling = JointRecords("a", "b", tuple((1, o, 1, 1, 100 - o, 1) for o in range(50)))
    assert Correlations(falling).rho["output", "output"] == pytest.approx(-1)
    assert not Correlations(falling).mask


def test_what_was_seen_narrows_the_next_llm_call_behind_a_search():
    demand = ApplicationDemand(chain(), RATES)
    prior = demand.refined("search", None)
    small, large = (demand.refined("search", Seen("plan", 100, tokens, 2)) for tokens in (5, 95))
    assert small.longest_s.max() < large.longest_s.min()
    for refined, tokens in ((small, 5), (large, 95)):
        assert refined.longest_s.mean() == pytest.approx(3.0 + 0.2 + 0.1 * tokens, rel=0.2)
        assert refined.longest_s.std() < 0.6 * prior.longest_s.std()
    llm_s = large.total_s - large.longest_s  # one more request than the longest
    assert (llm_s > 0.2 + 8.5).all() and (llm_s < 0.2 + 10.1).all()


def test_uncorrelated_calls_are_not_narrowed():
    demand = ApplicationDemand(chain(correlated=False), RATES)
    small, large = (demand.refined("answer", Seen("plan", 100, tokens, 1)) for tokens in (5, 95))
    assert abs(small.total_s.mean() - large.total_s.mean()) < 0.15 * small.total_s.mean()


def test_too_few_joint_matches_fall_back_to_one_variable_then_to_all():
    """Inputs follow both upstream variables. (in, out) = (0, 99) never came together, but (0, ·) often did."""
    rows = [(0, 0, 1, 0, 5, 1)] * 50 + [(99, 99, 1, 99, 5, 1)] * 50 + [(99, 0, 1, 60, 5, 1)] * 4
    unit = DemandStep("b", "llm", (END,), tuple(row[3] for row in rows), (5,) * len(rows), (1,) * len(rows))
    pair = Correlations(JointRecords("a", "b", tuple(rows)))
    assert {("input", "input"), ("input", "output")} <= pair.mask
    draw = lambda *seen: set(pair.draw(Seen("a", *seen), unit, np.random.default_rng(0), 500)[0])  # noqa: E731
    assert draw(0, 0, 1) == {0} and draw(99, 99, 1) == {99}
    most = max((("input", "input"), ("input", "output")), key=lambda edge: pair.rho[edge])
    assert draw(0, 99, 1) == ({0} if most == ("input", "input") else {99})
    assert draw(50, 50, 1) == {0, 60, 99}  # neither was ever seen


def test_ten_matching_records_are_enough_and_nine_are_not():
    unit = DemandStep("b", "llm", (END,), (0, 99), (5, 5), (1, 1))
    for matching, inputs in ((10, {0}), (9, {0, 99})):
        rows = [(0, 5, 1, 0, 5, 1)] * matching + [(99, 5, 1, 99, 5, 1)] * 50
        pair = Correlations(JointRecords("a", "b", tuple(rows)))
        assert set(pair.draw(Seen("a", 0, 5, 1), unit, np.random.default_rng(0), 500)[0]) == inputs


def test_outputs_follow_their_own_inputs():
    rows = [(5, 5, 1, i, 10 * i, 1) for i in range(100)] * 2
    unit = DemandStep("b", "llm", (END,), tuple(r[3] for r in rows), tuple(r[4] for r in rows), (1,) * len(rows))
    pair = Correlations(JointRecords("a", "b", tuple(rows)))
    inputs, outputs, _ = pair.draw(Seen("a", 5, 5, 1), unit, np.random.default_rng(0), 500)
    assert pair.mask == {("output", "own input")}
    assert np.abs(outputs - 10 * inputs).max() <= 100  # a tenth of the range
    assert np.ptp(inputs) > 90


def test_the_same_questions_have_the_same_answers():
    first, second = (ApplicationDemand(chain(), RATES, seed=3).refined("search", Seen("plan", 1, 9, 1)) for _ in "ab")
    assert (first.total_s == second.total_s).all()
