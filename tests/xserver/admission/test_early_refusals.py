"""Refusals before a request's tokens are known, and the effect of the frontend's own load on admission."""

import asyncio
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.xserver.admission.test_admission_control import WIDE, admission
from xcore.requests.request import Request
from xcore.tokenizer import load_tokenizer
from xrunner.models.create import create_model
from xserver.admission.loop_lag import LoopLag
from xserver.admission.token_bounds import TokenBounds
from xserver.admission.tokenizer_queue import TokenizerQueue
from xserver.engines.engine_link import Output
from xserver.http.api_error import ApiError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bounds") / "model"
    sizes = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 2, "ffn": 32, "vocab": 2000, "context": 256}
    create_model(directory, "llama", **sizes, merges=True)
    return load_tokenizer(directory)


@given(text=st.text(min_size=1, max_size=60))
def test_a_texts_tokens_are_within_its_extent(tokenizer, text):
    longest = max(map(len, tokenizer.get_vocab()))
    bounds = TokenBounds.of_prompts([text], longest, 1, 16)
    assert bounds.least_input <= len(tokenizer.encode(text).ids) <= bounds.most_input
    ids = TokenBounds.of_prompts([[1] * len(text), [1]], longest, 3, 16)
    assert (ids.sequences, ids.least_input, ids.most_input) == (6, len(text), len(text))


def overloaded(tokens: int = 300):
    """An admission that has accepted as many requests as it can."""
    present = []
    made = admission(present, bound_s=12.0, **WIDE)
    with pytest.raises(ApiError):
        while True:
            promise = made.admit([(100, tokens)], 100.0)
            present.append(Output(Request("x", (1,) * 100, tokens), tokens=[0], due_s=promise.due_s))
    return made


@settings(max_examples=40, deadline=None)
@given(
    sequences=st.integers(1, 3),
    least=st.integers(1, 2000),
    more=st.integers(0, 2000),
    tokens=st.integers(1, 900),
    shorter=st.integers(1, 900),
)
def test_what_is_refused_early_would_be_refused_with_any_of_its_tokens(sequences, least, more, tokens, shorter):
    made = overloaded()
    with pytest.raises(ApiError):
        while True:
            made._accepted -= made.admit([(100, shorter)], 100.0) is not None  # ask, without taking a place
            shorter += 100
    bounds = TokenBounds(sequences, 0, least, least + more, tokens)
    try:
        made.refuse_early(bounds, 100.0, TokenizerQueue())
    except ApiError as error:
        for prompt in (least, least + more):
            made._refusals.clear(math.inf)
            with pytest.raises(ApiError) as refused:
                made.admit([(prompt, tokens)] * sequences, 100.0)
            assert refused.value.code == error.code == "latency_bound"


def test_an_overloaded_engine_refuses_at_once_until_it_answers():
    made, queue = overloaded(), TokenizerQueue()
    alike = TokenBounds(1, 400, 10, 100, 300)
    with pytest.raises(ApiError, match="latency bound") as refused:
        made.refuse_early(alike, 100.0, queue)
    assert float(refused.value.headers["retry-after-ms"]) > 0
    made.refuse_early(TokenBounds(1, 400, 10, 100, 2), 100.0, queue)  # a short output wasn't refused
    made.stepped()
    with pytest.raises(ApiError, match="latency bound"):  # a moment later it would be refused again
        made.refuse_early(alike, 100.0, queue)
    made._clock.s += 0.02
    made.stepped()
    made.refuse_early(alike, 100.0, queue)  # the engine's message may have changed it


def test_texts_that_wait_for_the_tokenizer_count():
    made, queue = admission([]), TokenizerQueue()
    bounds = TokenBounds(1, 100, 10, 100, 50)
    made.refuse_early(bounds, 100.0, queue)
    queue._characters, queue._character_s = 10**6, 3e-5
    with pytest.raises(ApiError, match="tokenized") as refused:
        made.refuse_early(bounds, 100.0, queue)
    assert refused.value.code == "latency_bound"
    made.refuse_early(bounds, 100.0)  # it is tokenized at once
    queue._characters, queue.length = 0, 1000
    with pytest.raises(ApiError, match="already waiting") as refused:
        made.refuse_early(bounds, 100.0, queue)
    assert refused.value.code == "concurrency_limit"


def test_the_tokenizers_queue_learns_and_empties():
    async def tokenized():
        queue = TokenizerQueue()
        waiting = [asyncio.ensure_future(queue.run(1000, lambda: time.sleep(0.02))) for _ in range(3)]
        await asyncio.sleep(0)
        assert queue.length == 3 and queue.wait_s == pytest.approx(3000 * 1e-6)
        await asyncio.gather(*waiting)
        assert queue.length == 0 == queue.wait_s and queue._request_s > 0.005
        with pytest.raises(ZeroDivisionError):
            await queue.run(10, lambda: 1 / 0)
        assert queue.length == 0 == queue.wait_s

    asyncio.run(tokenized())


def test_the_time_of_a_short_text_is_not_that_of_its_characters():
    """A grammar of a short text takes as long as before; a long text behind it isn't taken for a thousand of them."""

    async def waiting():
        queue = TokenizerQueue()
        await queue.run(2, lambda: time.sleep(0.02))
        await queue.run(100_000, lambda: time.sleep(0.02))
        tokenizing = asyncio.ensure_future(queue.run(100_000, lambda: None))
        await asyncio.sleep(0)
        wait_s = queue.wait_s
        await tokenizing
        return wait_s

    assert 0.0 < asyncio.run(waiting()) < 1.0


def test_the_loops_lag_shortens_what_is_promised():
    late, made = [0.0], admission([])
    made._lag_s = lambda: late[0]
    prompt = made.admit([(100, 50)], 100.0).due_s
    late[0] = 0.5
    assert made.admit([(100, 50)], 100.0).due_s == pytest.approx(prompt - 1.0)


def test_a_busy_loop_is_seen_to_lag():
    async def busy():
        lag = LoopLag()
        watching = asyncio.ensure_future(lag.watch())
        await asyncio.sleep(0.05)
        time.sleep(0.3)
        await asyncio.sleep(0.05)
        watching.cancel()
        return lag.recent_s

    assert asyncio.run(busy()) >= 0.2
