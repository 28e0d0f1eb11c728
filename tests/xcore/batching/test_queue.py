"""The queue: sequences in the order of keys that may change while they wait."""

from hypothesis import given
from hypothesis import strategies as st

from xcore.batching import BlockPool, Ledger, Queue, Sequence, Step
from xcore.batching.order import FollowingOrder
from xcore.orders import fcfs


class LeastSlack:
    """An order that changes with time: deadlines of short prompts approach, those of long ones have passed."""

    changes = True

    def key(self, sequence, now):
        return abs(sequence.arrival_s + sequence.input_tokens - now)


def queue(order, rows):
    waiting = Queue(order)
    sequences = [Sequence(i, tokens, 1, arrival) for i, (tokens, arrival) in enumerate(rows)]
    for sequence in sequences:
        waiting.push(sequence)
    return waiting, sequences


ROWS = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20).map(float)), max_size=20)


@given(ROWS, st.lists(st.tuples(st.integers(0, 30).map(float), st.integers(0, 3)), max_size=12), st.booleans())
def test_the_first_is_whoever_has_the_least_key_now(rows, looks, changes):
    """Against a plain list that is sorted anew at every look."""
    order = LeastSlack() if changes else fcfs
    waiting, left = queue(order, rows)
    for now, count in sorted(looks):
        for _ in range(count):
            arrived = sorted((s for s in left if s.arrival_s <= now), key=lambda s: (order.key(s, now), s.index))
            assert waiting.first(3, now) == arrived[:3]
            assert waiting.peek(now) is (arrived[0] if arrived else None)
            later = [s.arrival_s for s in left if s.arrival_s > now]
            assert waiting.next_arrival(now) == min(later, default=None)
            if arrived:
                assert waiting.pop() is arrived[0]
                left.remove(arrived[0])
            assert len(waiting) == len(left)
    assert set(waiting) == set(left)
    assert waiting.drain() == left and not waiting


def test_an_order_that_changes_is_asked_again_at_a_new_moment_alone():
    asked = []

    class Counting(LeastSlack):
        def key(self, sequence, now):
            asked.append(now)
            return super().key(sequence, now)

    waiting, _ = queue(Counting(), [(5, 0.0), (3, 0.0)])
    assert waiting.peek(1.0).input_tokens == 3
    asked.clear()
    waiting.peek(1.0)
    assert not asked
    assert waiting.peek(6.0).input_tokens == 5
    assert asked == [6.0, 6.0]


def test_removed_sequences_are_gone_whether_they_have_arrived_or_not():
    waiting, (early, late, stays) = queue(fcfs, [(5, 0.0), (3, 9.0), (4, 1.0)])
    waiting.peek(2.0)
    waiting.remove([early, late])
    assert waiting.first(9, 99.0) == [stays]


class Following(FollowingOrder):
    """What an order is told, in its words."""

    def __init__(self):
        self.told = []

    def fresh(self):
        return self

    def key(self, sequence, now):
        return sequence.index

    def wait(self, sequence, now):
        self.told.append(("waits", sequence.index, now))

    def start(self, sequence, now):
        self.told.append(("starts", sequence.index, now))

    def end(self, sequence):
        self.told.append(("ends", sequence.index))


def test_an_order_that_follows_is_told_what_happens_to_sequences():
    """Of an arrival before a step is decided, whether or not anyone can be admitted then."""
    order = Following()
    ledger = Ledger(BlockPool(2, 4), order)
    runs, stops, leaves = sequences = [Sequence(i, 1, 2, 2.0 + i) for i in range(3)]
    ledger.submit(sequences)
    ledger.observe(1.0)
    assert order.told == []
    ledger.observe(2.5)
    assert order.told == [("waits", 0, 2.5)]
    order.told.clear()
    assert ledger.admit(3, 3.0) == [runs, stops]
    assert [told[:2] for told in order.told if told[0] == "starts"] == [("starts", 0), ("starts", 1)]
    ledger.observe(4.0)
    ledger.advance(Step(tuple((sequence, 1) for sequence in (runs, stops))))
    order.told.clear()
    ledger.stop(stops)
    ledger.cancel(leaves)
    ledger.advance(Step(decode=(runs,)))
    assert order.told == [("ends", 1), ("ends", 2), ("ends", 0)]


def test_another_may_come_first_unasked_where_keys_change_or_an_order_follows():
    """Of two that have arrived; by arrival nothing changes."""
    for order, unsteady in ((LeastSlack(), True), (Following(), True), (fcfs, False)):
        waiting, _ = queue(order, [(5, 0.0), (3, 1.0), (4, 9.0)])
        assert [waiting.arrived(now) and waiting.unsteady for now in (0.5, 1.5)] == [False, unsteady]
