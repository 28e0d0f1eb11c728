"""Streams end with their clients, whenever those leave, and close what they were made of."""

import asyncio

import pytest

from xserver.http import event_stream
from xserver.http.event_stream import EventStream, event


class Documents:
    """Documents as a stream's answer."""

    last_event = b"data: [DONE]\n\n"

    def __init__(self, documents):
        self._documents = documents

    def chunks(self):
        return self._documents

    def event(self, document) -> bytes:
        return event(document)

    def failure(self, error) -> bytes:
        return event(error.body)


async def stream(send, receive, documents, stall_s=60.0) -> int:
    """How often a stream is closed that is written until it ends."""
    closed = []
    await EventStream(Documents(documents), lambda: closed.append(1), stall_s)({}, receive, send)
    return len(closed)


async def tasks_left() -> int:
    """Tasks beside this one, after those that were cancelled have ended."""
    for _ in range(20):
        await asyncio.sleep(0)
    return len(asyncio.all_tasks()) - 1


async def endless(documents=1):
    """Documents, and then nothing more."""
    for number in range(documents):
        yield {"number": number}
    await asyncio.Event().wait()


async def stays():
    """A client that doesn't leave."""
    return await asyncio.Event().wait()


@pytest.mark.parametrize("turns", range(8))
def test_a_client_may_leave_in_any_turn_of_a_send(turns):
    """Whatever comes first, the end of a send or the client's: no task is left that writes to nobody."""

    async def run():
        sends = asyncio.Event()

        async def send(message):
            if message.get("body"):
                sends.set()
                await asyncio.sleep(0)
                await asyncio.sleep(0)

        async def receive():
            await sends.wait()
            for _ in range(turns):
                await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        return await stream(send, receive, endless()), await tasks_left()

    assert asyncio.run(run()) == (1, 0)


def test_a_reader_that_takes_nothing_is_taken_for_gone():
    async def run():
        async def send(message):
            if message.get("body"):
                await stays()

        return await stream(send, stays, endless(), stall_s=0.02), await tasks_left()

    assert asyncio.run(run()) == (1, 0)


def test_a_reader_that_takes_its_time_gets_all():
    sent = []

    async def run():
        async def send(message):
            await asyncio.sleep(0.01)
            sent.append(message.get("body", b""))

        async def documents():
            yield {"a": "木"}
            yield {"b": 1}

        return await stream(send, stays, documents(), stall_s=10), await tasks_left()

    assert asyncio.run(run()) == (1, 0)
    assert b"".join(sent).decode() == 'data: {"a":"木"}\n\ndata: {"b":1}\n\ndata: [DONE]\n\n'


def test_a_silent_answer_sends_comments_until_its_end(monkeypatch):
    monkeypatch.setattr(event_stream, "_SILENCE_S", 0.02)
    sent = []

    async def run():
        async def send(message):
            sent.append(message.get("body", b""))

        async def documents():
            yield {"a": 1}
            await asyncio.sleep(0.1)
            yield {"b": 2}

        return await stream(send, stays, documents()), await tasks_left()

    assert asyncio.run(run()) == (1, 0)
    comments = sent.count(b": keep-alive\n\n")
    assert 2 <= comments <= 5 and sent.index(b": keep-alive\n\n") > sent.index(event({"a": 1}))
    assert sent[-2:] == [event({"b": 2}), b"data: [DONE]\n\n"]
