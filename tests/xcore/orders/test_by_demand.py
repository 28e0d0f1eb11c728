"""Orders by the remaining demand of applications: what of a run they follow, and when it changes their choice."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.xcore.orders.cases import DEMANDS, demands
from xcore.batching import Hints, Queue, Sequence, Step
from xcore.batching.sequence import FINISHED
from xcore.orders import make_order
from xcore.orders.by_demand import MOST_IDLE, DemandGittins, DemandSlack
from xcore.orders.gittins import gittins_rank


def call(index, application, run, unit="first", client="me", tokens=1, **hints):
    own = Hints(application=application, run=run, unit=unit, client=client, **hints)
    return Sequence(index, tokens, 100, hints=own)


def firsts(queue, *sequences, now=0.0):
    for sequence in sequences:
        queue.push(sequence)
    return [sequence.index for sequence in queue.first(99, now)]


def finish(order, sequence, generated):
    """Run a sequence from its admission to its end."""
    order.start(sequence, 0.0)
    order.book(Step(((sequence, sequence.input_tokens),), ()), 1)
    sequence.to_prefill, sequence.generated = 0, generated
    order.book(Step((), (sequence,)), generated - 1)
    sequence.status = FINISHED
    order.end(sequence)


def test_likely_early_ends_come_before_lower_means():
    """Application a has 2 or 30 tokens in its first call and five times as many in its second; b always 10 or 11."""
    order = DemandGittins(DEMANDS)
    assert firsts(Queue(order), call(0, "b", "0"), call(1, "a", "0")) == [1, 0]
    assert DEMANDS.prior("a")[0].mean > DEMANDS.prior("b")[0].mean


def test_the_previous_call_refines_the_demand():
    """A run of a whose first call was long now waits behind b; one whose first call was short still goes first."""
    order = DemandGittins(DEMANDS)
    queue = Queue(order)
    for name, generated in (("long", 30), ("short", 2)):
        begun = call(len(name), "a", name)
        order.wait(begun, 0.0)
        finish(order, begun, generated)
    waiting = [call(10, "a", "long", "second"), call(11, "b", "0"), call(12, "a", "short", "second")]
    assert firsts(queue, *waiting) == [12, 11, 10]
    plain = DemandGittins(demands((2, 30), (10, 11), refine=False))
    assert firsts(Queue(plain), *waiting) == [10, 12, 11], "without refinement, both are as any run of a"


def test_runs_are_separate_by_client():
    order = DemandGittins(DEMANDS)
    begun = call(0, "a", "same", client="other")
    order.wait(begun, 0.0)
    finish(order, begun, 30)
    waiting = [call(10, "a", "same", "second", client="other"), call(11, "b", "0"), call(12, "a", "same", client="me")]
    assert firsts(Queue(order), *waiting) == [12, 11, 10]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3), st.integers(1, 40)), min_size=2, max_size=6))
def test_ranks_are_those_of_the_whole_application(rows):
    """Against the definition: service of a call's running requests counts for those that wait."""
    order = DemandGittins(demands((2, 30), (10, 11), (1, 50, 60), refine=False))
    queue, attained, waiting = Queue(order), {}, []
    for number, (name, parallel, generated) in enumerate(rows):
        own = [call(10 * number + i, name, str(number)) for i in range(parallel + 1)]
        for sequence in own:
            queue.push(sequence)
        queue.first(99, 0.0)
        queue.remove(own[:parallel])
        for sequence in own[:parallel]:
            order.start(sequence, 0.0)
            order.book(Step(((sequence, 1),), ()), 1)
            order.book(Step((), (sequence,)), generated)
        attained[number] = parallel * (0.125 + 1.0 + generated)  # a prompt's token, the first one, and the others
        waiting.append((name, number, own[-1].index))

    def rank(name, number):
        demand = order.demands.prior(name)[0]
        bucket = int(10 * attained[number] / demand.most)
        return gittins_rank(demand.samples, bucket * demand.most / 10 if bucket < 10 else attained[number])

    ranks = {index: rank(name, number) for name, number, index in waiting}
    chosen = [ranks[sequence.index] for sequence in queue.first(99, 1.0)]
    assert chosen == pytest.approx(sorted(chosen))


def test_slack_counts_the_longest_remaining_demand():
    """c may need 1 + 60 + 300 tokens: with a later deadline than b, which needs at most 66, it must begin earlier."""
    order = DemandSlack(DEMANDS)
    waiting = [
        call(0, "b", "0", deadline_s=500.0),
        call(1, "c", "0", deadline_s=700.0),
        call(2, "a", "1"),
        call(3, "b", "1"),
        call(4, "b", "2", deadline_s=900.0),
    ]
    assert firsts(Queue(order), *waiting) == [1, 0, 4, 2, 3]
    short = call(5, "c", "short", deadline_s=700.0)
    order.wait(short, 0.0)
    finish(order, short, 1)
    after = [call(10, "b", "9", deadline_s=700.0), call(11, "c", "short", "second")]
    assert firsts(Queue(order), *after) == [10, 11], "its first call was short: so is its second; the deadline stays"


def test_unknown_applications_come_last_and_orders_begin_afresh():
    order = DemandGittins(DEMANDS)
    waiting = [call(0, "unknown", "0"), Sequence(1, 5, 5), call(2, "c", "0")]
    assert firsts(Queue(order), *waiting) == [2, 0, 1]
    assert firsts(Queue(make_order("gittins")), *waiting) == [0, 1, 2], "without any demand graph, by arrival"
    assert order.fresh().demands is order.demands and not order.fresh()._runs


def test_runs_without_requests_are_forgotten_at_last():
    order = DemandGittins(DEMANDS)
    for index in range(MOST_IDLE + 5):
        begun = call(index, "b", str(index))
        order.wait(begun, 0.0)
        order.end(begun)
    assert len(order._runs) == MOST_IDLE and not order._of
    alone = Sequence(MOST_IDLE + 9, 5, 5)
    order.wait(alone, 0.0)
    order.end(alone)
    assert len(order._runs) == MOST_IDLE, "a request without a run leaves nothing"
