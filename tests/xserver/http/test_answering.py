"""A request that was accepted for its cached prefix runs only if the engine has kept the prefix."""

import asyncio
from types import SimpleNamespace

import pytest

from tests.xserver.admission.test_admission_control import admission
from tests.xserver.http.test_generation import Link
from tests.xserver.text.test_output_text import BYTES
from xcore.requests.engine_protocol import Ended
from xcore.requests.request import Request
from xserver.admission.admission_control import Promise
from xserver.http.answering import _confirm
from xserver.http.api_error import ApiError
from xserver.http.generation import Choice, Generation
from xserver.text.output_text import OutputText
from xserver.text.stop_texts import StopTexts


def choice_of(tokens):
    return Choice(0, Request("", (1,), tokens), OutputText(BYTES["byte-level"], (1,)), StopTexts(()))


def confirm(counted, held, reason=None, tokens=(), found=0):
    """The link, and the error, of a request that counts on its cached tokens, once the engine has answered."""
    frontend, link = SimpleNamespace(check_ready=lambda: None, admission=admission([]), active=0), Link()

    async def run():
        promise, generation = Promise(0.0, 1.0, 5, 0.1, cached=counted), Generation(link, [choice_of(5)])
        confirming = asyncio.ensure_future(_confirm(SimpleNamespace(promise=promise, generation=generation), frontend))
        await asyncio.sleep(0)
        assert confirming.done() == (not counted) and frontend.active == len(counted)  # a drain waits for it
        link.output.held, link.output.cached_tokens = held, found
        link.give(tokens, reason)
        await asyncio.wait_for(confirming, 0.05)

    try:
        asyncio.run(run())
    except (ApiError, TimeoutError, asyncio.TimeoutError) as error:
        return link, error
    finally:
        assert frontend.active == 0
    return link, None


@pytest.mark.parametrize(("counted", "held"), [((48,), 48), ((48,), 64), ((), None)])
def test_it_runs_if_the_engine_keeps_as_many_tokens(counted, held):
    link, error = confirm(counted, held)
    assert error is None and not link.aborted and link.output.listeners


@pytest.mark.parametrize(("held", "reason"), [(47, None), (0, None), (None, "error")])
def test_it_is_refused_and_aborted_if_the_engine_has_lost_some(held, reason):
    link, error = confirm((48,), held, reason)
    assert error.status == 429 and error.code == "latency_bound"
    assert link.aborted == ([] if reason else [link.output]) and not link.output.listeners


@pytest.mark.parametrize(("found", "runs"), [(48, True), (16, False)])
def test_the_start_answers_for_an_engine_that_pins_nothing(found, runs):
    """As after a restart under another schedule: its whole answer must not be awaited, and then dropped."""
    link, error = confirm((48,), None, tokens=[5], found=found)
    assert (error is None) == runs and bool(link.aborted) != runs


def test_it_is_aborted_if_it_is_given_up_before_the_engine_answers():
    link, error = confirm((48,), None)
    assert not isinstance(error, ApiError) and link.aborted == [link.output] and not link.output.listeners


def test_pieces_come_after_the_answer_as_before():
    """Waiting for the engine's answer loses no token that has come meanwhile."""

    async def run():
        link = Link()
        generation = Generation(link, [choice_of(2)])
        link.output.held = 16
        link.output.tokens += [40, 41]
        link.output.ended = Ended("0", "length")
        assert await generation.held() == [16]
        return await asyncio.wait_for(generation.finished(), 1.0)

    assert asyncio.run(run())[0]
