"""A server's promises around an order: whoever has waited for its slack is passed by nobody who came later."""

from hypothesis import given, settings
from hypothesis import strategies as st

from xcore.batching import BlockPool, Hints, Ledger, Sequence
from xcore.orders import make_order
from xcore.orders.promised import Promised
from xcore.policies.orca import OrcaPolicy

ROWS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9), st.integers(0, 9), st.integers(0, 40)), max_size=14)
"""Arrival, output tokens, score, and slack."""


def run(rows, order, residents=2):
    """Run rows to their ends; the index and time of each admission."""
    ledger, policy = Ledger(BlockPool(1000, 4), order), OrcaPolicy(residents, 1)
    ledger.submit(
        Sequence(i, 5, output, float(arrival), hints=Hints(score=float(score), slack_s=float(slack)))
        for i, (arrival, output, score, slack) in enumerate(rows)
    )
    now, admitted = 0.0, []
    while not ledger.idle:
        ledger.observe(now)
        step = policy.next_step(ledger, now)
        if step:
            admitted += [(sequence.index, now) for sequence, _ in step.encode]
            ledger.advance(step)
        now += 1.0
        assert now < 1000
    return admitted


@settings(max_examples=300, deadline=None)
@given(ROWS)
def test_nobody_passes_a_request_that_has_waited_for_its_slack(rows):
    """The oracle: those that wait at an admission. Of those without slack the first that came comes first."""
    came = sorted(range(len(rows)), key=lambda i: (rows[i][0], i))
    waiting = set(came)
    for index, now in run(rows, Promised(make_order("learned"))):
        there = [i for i in came if i in waiting and rows[i][0] <= now]
        over = [i for i in there if rows[i][0] + rows[i][3] <= now]
        best = min(there, key=lambda i: (-rows[i][2], rows[i][0], i))
        assert index == (over[0] if over else best)
        waiting.remove(index)


@settings(max_examples=100, deadline=None)
@given(ROWS)
def test_without_slack_it_is_first_come_first_served(rows):
    rows = [(*row[:3], 0) for row in rows]
    assert run(rows, Promised(make_order("learned"))) == run(rows, make_order("fcfs"))


@settings(max_examples=100, deadline=None)
@given(ROWS)
def test_with_endless_slack_it_is_the_inner_order(rows):
    rows = [(*row[:3], 10**6) for row in rows]
    for name in ("learned", "mlfq", "doubling-budget"):
        assert run(rows, Promised(make_order(name))) == run(rows, make_order(name))
