"""The order of policies in an answer, the reasons that they share, and bounds of a frontier, on answers by hand."""

from types import SimpleNamespace

import pytest

from xscheduler import setting_search
from xscheduler.search import Search
from xscheduler.setting_search import best_on, frontier_bounds, infeasible_text, ranked, reasons, throughput
from xscheduler.tuned import Alternative, Tuned


def alternative(policy, rate, reason="slow", clause=""):
    estimate = None if rate is None else SimpleNamespace(throughput_tok_s=rate, latency_s=4.0)
    return Alternative(policy, None if rate is None else SimpleNamespace(policy=policy), estimate, reason, clause)


def answer(*alternatives, best=None, lowest_s=None):
    won = next((a for a in alternatives if a.policy == best), Alternative("", None, None, ""))
    return Tuned(won.schedule, won.estimate, alternatives, Search("bnb", 1, 1, 0.1), lowest_s, ())


def test_the_answer_comes_first_then_falling_throughputs_and_what_has_none_last():
    """An answer may be the simpler of two that are as good."""
    every = alternative("rra", None), alternative("static", 0.5), alternative("orca", 9.9), alternative("chunked", 10.0)
    assert [a.policy for a in ranked(answer(*every, best="orca"))] == ["orca", "chunked", "static", "rra"]
    assert [a.policy for a in ranked(answer(*every))] == ["chunked", "orca", "static", "rra"]
    assert [throughput(a) for a in every] == [-1.0, 0.5, 9.9, 10.0]


def test_policies_with_the_same_reason_share_a_line():
    every = alternative("rra", 1.0), alternative("orca", 1.0, "late; slow", "late"), alternative("static", 1.0)
    assert reasons(every) == ["rra, static: slow", "orca: late; slow"]
    assert reasons(every, explain=False) == ["rra, static: slow", "orca: late"]


def test_the_best_on_an_engine_is_of_its_policies():
    every = answer(alternative("rra", 12.0), alternative("orca", 9.0), alternative("chunked", 10.0))
    assert best_on(every, "exegpt").policy == "rra" and best_on(every, "vllm").policy == "chunked"
    assert best_on(every, "exegpt", lambda a: 1 / throughput(a)).policy == "orca"
    assert best_on(answer(alternative("chunked", None)), "vllm") is None


@pytest.mark.parametrize(
    ("lowest_s", "bound_s", "text"),
    [
        (None, 5.0, "No schedule fits: orca: slow."),
        (3.0, None, "No schedule meets the requested settings: orca: slow."),
        (5.0, 5.0, "No schedule meets the requested settings: orca: slow."),
        (5.5, 5.0, "No schedule meets the bound of 5s: the lowest reachable latency is 5.5 s."),
        (3.352886, 1e-3, "No schedule meets the bound of 1ms: the lowest reachable latency is 3.36 s."),
    ],
)
def test_why_there_is_no_schedule_is_told_by_the_lowest_latency(lowest_s, bound_s, text):
    assert infeasible_text(answer(alternative("orca", None), lowest_s=lowest_s), bound_s) == text


@pytest.mark.parametrize(("lowest_s", "count", "bounds"), [(1.0, 3, 3), (3.7, 3, 0), (None, 3, 0)])
def test_a_frontier_reaches_from_a_tenth_above_the_lowest_latency_to_that_without_a_bound(
    monkeypatch, lowest_s, count, bounds
):
    """By equal ratios; alone without a bound where both are as far apart as a tenth, at 4 s."""
    asked = []
    found = answer(alternative("orca", 9.0), best="orca", lowest_s=lowest_s)
    monkeypatch.setattr(setting_search, "search_schedule", lambda *where, **how: asked.append((where, how)) or found)
    *bounded, last = frontier_bounds("setting", count, policies=("orca",))
    assert last is None and len(bounded) == bounds
    assert asked == [(("setting", None), {"policies": ("orca",), "lowest_latency": True})]
    if bounded:
        assert bounded == pytest.approx([1.1, (1.1 * 4.0) ** 0.5, 4.0])
