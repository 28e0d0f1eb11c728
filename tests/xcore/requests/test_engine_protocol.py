"""A token's event is the same record on both sides of the engine's socket."""

from xcore.requests.engine_protocol import (
    FROM_ENGINE,
    Ended,
    EngineLoad,
    Frames,
    Stepped,
    TokenColumns,
    TokenEvent,
    framed,
)

EVENTS = [
    TokenEvent("7", 0, 40, 0.5, (-1.5, ((40, -1.5), (41, -2.0))), 0.25, ((None, ()), (-3.0, ((9, -0.5),)))),
    TokenEvent("8", 3, 41, 0.5),
    TokenEvent("7", 1, 42, 0.75, (-9999.0, ())),
]


def sent(events):
    occupancy = EngineLoad(0, 0, 2, 3, 4, 0)
    message = Stepped(1.0, TokenColumns.of(events), (Ended("8", "stop"),), occupancy)
    (received,) = Frames(FROM_ENGINE).feed(framed(message))
    assert (received.now_s, received.ended, received.occupancy) == (1.0, message.ended, occupancy)
    return received.tokens


def test_events_arrive_as_they_were_sent():
    assert list(sent(EVENTS).events()) == EVENTS


def test_events_without_log_probabilities_send_none():
    tokens = sent(EVENTS[1:2])
    assert tokens.logprobs is None and tokens.prompts == {} and len(tokens) == 1
    assert list(tokens.events()) == EVENTS[1:2]


def test_a_step_may_give_no_token():
    assert list(sent([]).events()) == []
