"""Every order: nothing is lost; and what each puts first."""

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.xcore.orders.cases import DEMANDS, ROWS, run, sequences
from xcore.batching import Hints, Queue, Sequence, Step
from xcore.errors import InputError
from xcore.orders import ORDERS, StarvationGuard, make_order
from xcore.orders.doubling_budget import DoublingBudget
from xcore.orders.mlfq import SkipJoinMLFQ

NAMES = st.sampled_from(sorted(ORDERS))


@settings(max_examples=250, deadline=None)
@given(NAMES, st.booleans(), ROWS)
def test_nothing_is_lost_and_preempted_sequences_end(name, guarded, rows):
    """Six blocks of eight tokens: the longest request needs all but one of them."""
    done, admitted, ledger = run(make_order(name, guarded, DEMANDS), rows)
    assert [s.generated for s in done] == [row[1] for row in rows]
    assert len(admitted) == len(rows) + ledger.preemptions
    assert ledger.pool.available == ledger.pool.total


def test_such_runs_preempt():
    rows = [(20, 12, 0, "a", 9)] * 5
    assert all(run(make_order(name, demands=DEMANDS), rows)[2].preemptions for name in ORDERS)


@settings(max_examples=150, deadline=None)
@given(NAMES, st.booleans(), ROWS, st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), max_size=15))
def test_a_queue_gives_whoever_has_the_least_key(name, guarded, rows, moves):
    """Against a search of all that wait, with keys and groups' keys of the moment."""
    order = make_order(name, guarded, DEMANDS)
    queue, waiting = Queue(order), sequences(rows)
    for sequence in waiting:
        queue.push(sequence)
    now, running = 0.0, []
    for count, gap in moves:
        now += gap
        for _ in range(count):
            first = queue.peek(now)
            there = [s for s in waiting if s.arrival_s <= now]
            assert first is min(there, key=lambda s: full_key(order, s, now), default=None)
            assert queue.first(1, now) == ([first] if first else [])
            if first:
                assert queue.pop() is first
                waiting.remove(first)
                running.append(first)
                if hasattr(order, "start"):
                    order.start(first, now)
        if hasattr(order, "book"):
            order.book(Step(tuple((s, s.to_prefill) for s in running), ()), gap * 10)
    assert set(queue) == set(waiting)


def full_key(order, sequence, now):
    group = order.group_key(order.group(sequence)) if hasattr(order, "group") and order.grouped else 0
    return group, order.key(sequence, now), sequence.index


def firsts(order, waiting, now=0.0):
    """All sequences in order, none of which is run."""
    queue = Queue(order)
    for sequence in waiting:
        queue.push(sequence)
    return [s.index for s in queue.first(len(waiting), now)]


def hinted(*hints, tokens=10):
    return [Sequence(i, tokens, 50, hints=own) for i, own in enumerate(hints)]


def test_what_each_order_puts_first():
    apps = hinted(*(Hints(application=a, application_arrival_s=t) for a, t in (("b", 1.0), ("a", 0.0), ("b", 1.0))))
    assert firsts(make_order("fcfs-app"), apps, 2.0) == [1, 0, 2]
    lengths = hinted(Hints(output_tokens=9), Hints(output_tokens=5), Hints(output_tokens=7))
    assert firsts(make_order("sjf"), lengths) == firsts(make_order("srtf"), lengths) == [1, 2, 0]
    lengths[0].generated = 6
    assert firsts(make_order("srtf"), lengths) == [0, 1, 2] and firsts(make_order("sjf"), lengths) == [1, 2, 0]
    assert firsts(make_order("learned"), hinted(Hints(score=-2.0), Hints(score=3.0))) == [1, 0]
    due = hinted(
        Hints(deadline_s=50.0, time_s=5.0), Hints(deadline_s=60.0, time_s=40.0), Hints(deadline_s=inf, time_s=1.0)
    )
    assert firsts(make_order("edf"), due) == [0, 1, 2] and firsts(make_order("least-slack"), due) == [1, 0, 2]
    weighed = hinted(Hints(time_s=4.0, service_time_s=3.0), Hints(time_s=1.0, service_time_s=10.0))
    assert firsts(make_order("product"), weighed) == [1, 0]


def test_round_robin_takes_turns_and_no_turn_is_saved():
    order = make_order("round-robin")
    rows = [("a", 0.0)] * 4 + [("b", 0.0)] * 2 + [("c", 9.0)] * 2
    queue, started = Queue(order), []
    for i, (service, arrival) in enumerate(rows):
        queue.push(Sequence(i, 1, 1, arrival, hints=Hints(service=service)))
    for now in (0.0, 0.0, 0.0, 9.0, 9.0, 9.0, 9.0, 9.0):
        first = queue.peek(now)
        queue.pop()
        order.start(first, now)
        started.append(rows[first.index][0])
    assert started == list("abab") + list("caca")


def test_a_doubled_budget_is_fresh():
    """Q_0 = 3; residence of 3 s exhausts it, and 6 s are new; 6 more exhaust these, and 12 are new."""
    order = DoublingBudget()
    (one,) = hinted(Hints(service_time_s=2.0, service_sd_s=1.0))
    budgets, now = [], 0.0
    for ran in (0.0, 2.0, 1.0, 4.0, 2.0, 1.0):
        order.start(one, now)
        order.stop(one, now + ran)
        now += ran
        budgets.append(order.budget(one))
    assert budgets == [3.0, 1.0, 6.0, 2.0, 12.0, 11.0]
    assert order.key(one, now)[1] == 22.0


def test_where_steps_count_a_budget_is_used_up_by_those_that_a_sequence_was_in():
    """A resident beside other models' waits for its turn."""
    order = DoublingBudget(executed=True)
    one, other = hinted(*[Hints(service_time_s=2.0, service_sd_s=1.0)] * 2)
    order.start(one, 0.0)
    order.ran(Step(decode=(other,)), 5.0, 5.0)
    assert (order.budget(one), order.budget(other)) == (3.0, 4.0)
    order.ran(Step(decode=(one,)), 2.0, 7.0)
    assert order.budget(one) == order.steady_s(one, 7.0) == 1.0
    order.wait(one, 7.0)
    assert order.next_change_s((), 7.0) == 22.0  # it has waited for 5 s of 20 so far


def test_the_starved_come_first_in_the_order_in_which_they_starved():
    """Ten times L̂: 20 s for the short service, 200 for the long."""
    queue = Queue(DoublingBudget())
    long, late = (Sequence(i, 1, 1, t, hints=Hints(service_time_s=20.0)) for i, t in ((0, 0.0), (1, 190.0)))
    shorts = [Sequence(2 + i, 1, 1, 199.5 + i, hints=Hints(service_time_s=2.0)) for i in range(5)]
    for sequence in (long, late, *shorts):
        queue.push(sequence)
    assert queue.peek(199.9) is shorts[0]
    assert queue.peek(200.0) is long
    queue.pop()
    assert queue.peek(201.0) is shorts[0]


def test_a_request_joins_the_level_that_holds_its_prefill_and_falls_with_each_quantum():
    order = SkipJoinMLFQ(quantum_s=1.0)
    short, long = hinted(Hints(prefill_s=0.5), Hints(prefill_s=3.0))
    assert (order.level(short), order.level(long)) == (0, 2)
    levels = []
    for ran in (0.9, 0.1, 1.9, 0.1):
        order.start(short, 0.0)
        order.stop(short, ran)
        levels.append(order.level(short))
    assert levels == [0, 1, 1, 2]


def test_vtc_serves_the_client_that_was_served_least_and_saves_nothing_up():
    order = make_order("vtc")
    a, b, c = (Sequence(i, 10, 50, 0.0, hints=Hints(client=name)) for i, name in enumerate("abc"))
    again = Sequence(3, 10, 50, 0.0, hints=Hints(client="a"))
    queue = Queue(order)
    for sequence in (a, b, again):
        queue.push(sequence)
    assert queue.peek(0.0) is a
    queue.pop()
    order.start(a, 0.0)
    order.book(Step(((a, 10),), ()), 1)
    assert order.group_key("a") == 2.0, "a tenth for each token of the prompt, and the first of the output"
    order.book(Step((), (a,)), 7)
    assert order.group_key("a") == 9.0 and queue.peek(0.0) is b
    queue.pop()
    order.start(b, 0.0)
    queue.push(c)
    queue.peek(0.0)
    assert order.group_key("c") == 9.0, "of those that wait, a has the least"


def test_the_guard_promotes_the_idle_for_a_quantum():
    order = StarvationGuard(make_order("sjf"), idle_steps=5, quantum=2)
    long, *shorts = hinted(Hints(output_tokens=90), *[Hints(output_tokens=1)] * 3)
    queue = Queue(order)
    for sequence in (long, shorts[0]):
        queue.push(sequence)
    assert queue.peek(0.0) is shorts[0]
    order.book(Step((), (shorts[2],)), 4)
    queue.push(shorts[1])
    assert queue.peek(1.0) is shorts[0]
    order.book(Step((), (shorts[2],)), 1)
    assert queue.first(3, 2.0) == [long, *shorts[:2]]
    assert queue.pop() is long
    order.start(long, 2.0)
    order.book(Step(((long, 10),), ()), 1)
    queue.push(long)
    assert queue.peek(3.0) is long, "one step of its quantum is left"
    queue.pop()
    order.start(long, 3.0)
    order.book(Step((), (long,)), 1)
    queue.push(long)
    assert queue.peek(4.0) is shorts[0]


def test_unknown_orders_and_missing_hints_are_refused():
    with pytest.raises(InputError, match=r"no order 'lifo': use one of fcfs"):
        make_order("lifo")
    for name, kind in ORDERS.items():
        if kind.needs:
            with pytest.raises(InputError, match=f"Order {name} needs {kind.needs[0]} of each request"):
                kind.check([Hints()])
        kind.check([sequences([(5, 5, 0, "a", 9)])[0].hints])
    assert {name for name, kind in ORDERS.items() if kind.oracle} == {"sjf", "srtf", "product", "least-slack"}
