"""Sessions of traces: by runs, conversations and chats; and drawn ones."""

from itertools import pairwise

from xcore.specs.workload import LengthDistribution, RequestLengths, Workload
from xcore.traces.prompt_identity import PromptIdentity
from xcore.traces.sessions import drawn_sessions, sessions_of


def request(arrival_s, **identity):
    return RequestLengths(9, 3, arrival_s, PromptIdentity(**identity) if identity else None)


def test_turns_of_a_session_are_in_the_order_of_their_arrivals():
    rows = [
        request(5.0, conversation="a"),
        request(1.0, conversation="a"),
        request(0.0),
        request(2.0, chat="1"),
        request(3.0, chat="2", parent_chat="1"),
        request(4.0, chat="3", parent_chat="2", conversation=None),
        request(2.5, chat="4", parent_chat="9"),  # the trace begins after its parent
        request(6.0, chat="5", parent_chat="9"),
        request(7.0, conversation="a"),
    ]
    assert sessions_of(rows, [None] * 9) == ((2,), (1, 0, 8), (3, 4, 5), (6, 7))
    assert sessions_of(rows, [None, "r", "r", *[None] * 6]) == ((2, 1), (3, 4, 5), (6, 7), (0, 8))


def test_drawn_sessions_grow_by_each_turns_prompt_and_answer():
    lengths = LengthDistribution((5, 40), (0.5, 0.5)), LengthDistribution.fixed(10)
    workload = Workload("w", *lengths, 10)
    rows = drawn_sessions(workload, 50, 4, 1, None)
    assert len(rows) == 200 and {row.output for row in rows} == {10}
    new = [(b.input - a.input - a.output) * (a.identity == b.identity) for a, b in pairwise(rows)]
    assert set(new) == {0, 5, 40} and new.count(0) == 49
    assert rows == drawn_sessions(workload, 50, 4, 1, None) != drawn_sessions(workload, 50, 4, 2, None)
    short = drawn_sessions(workload, 50, 4, 1, 100)
    assert max(row.input + row.output for row in short) <= 100 and set(short) < set(rows)
    assert [row.identity for row in drawn_sessions(workload, 5, 1, 1, None)] == [None] * 5
