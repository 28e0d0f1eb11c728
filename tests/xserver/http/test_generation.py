"""A choice takes the tokens up to its end, however many come at once, and none after it."""

import asyncio

import pytest

from tests.xserver.text.test_output_text import BYTES, TOKENIZERS
from xcore.requests.engine_protocol import Ended
from xcore.requests.request import Request
from xserver.engines.engine_link import Output
from xserver.http.api_error import ApiError
from xserver.http.generation import Choice, Generation
from xserver.text.output_text import OutputText
from xserver.text.stop_texts import StopTexts

TEXT = "one 木 two, three"


class Link:
    """An engine that is a list: `give` lets tokens come."""

    def __init__(self):
        self.aborted, self.stopped = [], None

    def add(self, request, due_s, keys=()):
        self.output = Output(request, due_s=due_s)
        return self.output

    def abort(self, outputs):
        self.aborted += [output for output in outputs if output not in self.aborted]

    def stop(self, output, output_tokens):
        self.stopped = output_tokens
        self.abort([output])

    def give(self, tokens, reason=None):
        self.output.tokens += tokens
        self.output.ended = Ended("0", reason) if reason else None
        for listener in self.output.listeners:
            listener()


def taken(at_once: int, stops=(), silent=(), reason="length", dropped=False):
    """The text, the choice and the link, where tokens come so many at once."""

    async def run():
        ids = TOKENIZERS["byte-level"].encode(TEXT, add_special_tokens=False).ids
        request, link = Request("", (1,), len(ids)), Link()
        text = OutputText(BYTES["byte-level"], (1,))
        choice = Choice(0, request, text, StopTexts(stops), frozenset(ids[i] for i in silent), dropped)
        generation = Generation(link, [choice])
        reading = asyncio.ensure_future(generation.finished())
        for begin in range(0, len(ids), at_once):
            if choice.finish_reason is None:
                link.give(ids[begin : begin + at_once], reason if begin + at_once >= len(ids) else None)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
        return (await reading)[0], choice, link

    return asyncio.run(run())


@pytest.mark.parametrize("at_once", [1, 2, 5, 100])
def test_tokens_behind_a_stop_text_are_not_counted(at_once):
    text, choice, link = taken(at_once, stops=["wo", "three"])
    kept = TOKENIZERS["byte-level"].encode("one 木 two", add_special_tokens=False).ids
    assert text == "one 木 t" and choice.finish_reason == "stop"
    assert choice.taken == len(kept) and choice.output.tokens[: choice.taken] == kept
    assert link.aborted or choice.output.ended
    assert link.stopped == choice.taken


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_a_token_that_ends_the_output_has_no_text(at_once):
    assert taken(at_once, silent=[-1], reason="stop")[0] == TEXT[:-1]
    text, choice, _ = taken(at_once, reason="length")
    assert text == TEXT and choice.taken == len(choice.output.tokens) and choice.finish_reason == "length"


def test_a_dropped_output_has_no_tokens():
    text, choice, _ = taken(1, dropped=True, reason="stop")
    assert (text, choice.taken, choice.finish_reason) == ("", 0, "length")


@pytest.mark.parametrize(
    "why, too_long, code, words",
    [
        ("Request '7' needs 9 KV blocks, and the schedule's cache has 8.", True, "context_length_exceeded", "too long"),
        ("Request '7' has a grammar, and it's in vain.", False, "invalid_value", "it has a grammar, and it's in vain."),
    ],
)
def test_a_refusal_of_the_engine_gives_its_reason(why, too_long, code, words):
    async def run():
        link = Link()
        choice = Choice(0, Request("", (1,), 5), OutputText(BYTES["byte-level"], (1,)), StopTexts(()))
        generation = Generation(link, [choice])
        link.output.ended = Ended("7", "error", refused=why, too_long=too_long)
        await generation.finished()

    with pytest.raises(ApiError, match=words) as refused:
        asyncio.run(run())
    assert (refused.value.status, refused.value.code) == (400, code) and "'7'" not in refused.value.message


@pytest.mark.parametrize("at_once", [1, 2, 3, 99])
@pytest.mark.parametrize("included", [True, False])
@pytest.mark.parametrize(
    "stops", [(), ("木 two, th",), ("e 木 two",), ("three",), ("never, though",), ("ee",), ("w", "two")]
)
def test_places_of_tokens_are_within_the_text_that_was_returned(at_once, stops, included):
    """Also in each piece of a stream: a stop text may hold text back, and cut it off."""
    ids = TOKENIZERS["byte-level"].encode(TEXT, add_special_tokens=False).ids

    async def run():
        link = Link()
        text = OutputText(BYTES["byte-level"], (1,))
        choice = Choice(0, Request("", (1,), len(ids), logprobs=0), text, StopTexts(stops, included))
        generation = Generation(link, [choice])
        link.output.logprobs = [(-1.0, ())] * len(ids)
        seen, entries, tokens = "", [], []
        for begin in range(0, len(ids), at_once):
            link.give(ids[begin : begin + at_once], "length" if begin + at_once >= len(ids) else None)
            piece = generation._take(choice)
            seen, entries, tokens = seen + piece.text, [*entries, *piece.logprobs], [*tokens, *piece.tokens]
            assert len(piece.logprobs) == len(piece.tokens)
            assert all(entry.offset <= len(seen) for entry in entries)
            if choice.finish_reason:
                break
        return seen, entries, tokens, choice

    seen, entries, tokens, choice = asyncio.run(run())
    stopped = any(stop in TEXT for stop in stops)
    assert choice.finish_reason == ("stop" if stopped else "length") and (stopped or seen == TEXT)
    assert entries == choice.logprobs and tokens == ids[: choice.taken] and len(entries) == choice.taken
    for entry in entries:
        own = entry.data.decode("utf-8", "replace")
        assert "\ufffd" in own or seen[entry.offset :].startswith(own) or own.startswith(seen[entry.offset :])
