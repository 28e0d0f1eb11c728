"""OpenAI's own client works with the server: answers, streams, its exceptions, and its retries."""

import asyncio

import pytest

from xcore.requests.engine_protocol import Ended
from xserver.admission.gate import ApiKeys, Gate
from xserver.admission.measured import RequestTiming
from xserver.admission.refusals import Demand, Refusal
from xserver.engines.engine_link import Output
from xserver.http.api import KINDS, make_api
from xserver.http.frontend import Frontend
from xserver.http.frontends import Frontends
from xserver.http.served_model import ServedModel

openai = pytest.importorskip("openai")
TALK = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
ASKED = {"model": "tiny", "temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_completions_whole_and_streamed(client):
    whole = client.completions.create(prompt="Hello", logprobs=2, echo=True, **ASKED)
    assert whole.choices[0].text.startswith("Hello") and whole.choices[0].finish_reason == "length"
    assert len(whole.choices[0].logprobs.tokens) == whole.usage.total_tokens == 13
    chunks = list(client.completions.create(prompt="Hello", stream=True, **ASKED))
    assert "Hello" + "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def test_chat_whole_and_streamed(client):
    whole = client.chat.completions.create(messages=TALK, logprobs=True, top_logprobs=1, **ASKED)
    (choice,) = whole.choices
    assert choice.message.role == "assistant" and whole.usage.completion_tokens == 8
    assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [1] * 8
    again = client.chat.completions.create(messages=[*TALK, choice.message, TALK[1]], **ASKED)
    assert again.usage.prompt_tokens > whole.usage.prompt_tokens
    with client.chat.completions.create(
        messages=TALK, stream=True, stream_options={"include_usage": True}, **ASKED
    ) as stream:
        *chunks, last = stream
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == choice.message.content
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason == "length"
    assert last.usage == whole.usage and last.choices == []


def test_the_streaming_helper_puts_a_message_together(client):
    asked = ASKED | {"logit_bias": {"256": 100}, "extra_body": {"min_tokens": 5}}
    with client.chat.completions.stream(messages=TALK, **asked) as stream:
        final = stream.get_final_completion()
    whole = client.chat.completions.create(messages=TALK, **asked)
    assert final.choices[0].finish_reason == "stop"  # the helper refuses answers that are cut
    assert final.choices[0].message.content == whole.choices[0].message.content


def test_many_at_once_from_asyncio(server):
    async def ask():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            asked = (client.chat.completions.create(messages=TALK, seed=i, **ASKED) for i in range(12))
            whole = await asyncio.gather(*asked)
            stream = await client.chat.completions.create(messages=TALK, stream=True, **ASKED)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            return whole, text

    whole, text = asyncio.run(ask())
    assert {answer.choices[0].message.content for answer in whole} == {text}
    assert len({answer.id for answer in whole}) == 12


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "exegpt"


@pytest.mark.parametrize(
    ("body", "kind", "code"),
    [
        ({"model": "other"}, openai.NotFoundError, "model_not_found"),
        ({"max_tokens": 500}, openai.BadRequestError, "context_length_exceeded"),
        ({"temperature": 9}, openai.BadRequestError, "invalid_value"),
        ({"verbosity": "high"}, openai.BadRequestError, "unsupported_parameter"),
        ({"stop": [""]}, openai.BadRequestError, "invalid_value"),
    ],
)
def test_errors_are_the_clients_exceptions(client, body, kind, code):
    with pytest.raises(kind) as error:
        client.chat.completions.create(messages=TALK, **(ASKED | body))
    assert error.value.code == code and error.value.request_id
    if code != "model_not_found":
        assert error.value.param == next(iter(body))


def test_other_paths_are_not_found(client):
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="a")


class Answering:
    """A link whose engine answers at once with the same two tokens."""

    def __init__(self):
        self.opened, self.outputs, self.starting = None, {}, ""

    def add(self, request, due_s, keys=()):
        return Output(request, tokens=[40, 41], ended=Ended(request.id, "length"))

    def abort(self, outputs):
        pass


class Refusing:
    """Admission that refuses the first requests."""

    def __init__(self, times: int):
        self.left = times

    def admit(self, lengths, arrived_s, cached):
        self.left -= 1
        if self.left >= 0:
            raise Refusal(Demand(1, 1, False), "latency_bound", "Too late.", 0.0, 0.0, 1.0, 0.0).error(0.2)

    def ended(self, output):
        pass

    def refuse_early(self, extent, arrived_s, tokenizing):
        pass


def asked_in_process(model, monkeypatch, admission, keys=(), key="none"):
    """The client's waits, and its answer or exception, from an application without a server."""
    import anyio
    import httpx2

    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    async def ask():
        frontend = Frontend(ServedModel.read(model, None), Answering(), "fp", None, 1.0, 8, admission)
        transport = httpx2.ASGITransport(
            Gate(RequestTiming(make_api(Frontends([frontend])), frontend.monitor, KINDS), ApiKeys(keys))
        )
        own = httpx2.AsyncClient(transport=transport)
        async with openai.AsyncOpenAI(base_url="http://localhost/v1", api_key=key, http_client=own) as client:
            monkeypatch.setattr(anyio, "sleep", sleep)
            try:
                return await client.completions.create(model="tiny", prompt="a")
            except openai.APIError as error:
                return error

    return waits, asyncio.run(ask())


def test_refused_requests_are_sent_again_after_the_time_that_the_server_names(model, monkeypatch):
    waits, answer = asked_in_process(model, monkeypatch, Refusing(1))
    assert answer.usage.completion_tokens == 2
    assert len(waits) == 1 and 0.2 <= waits[0] <= 0.281
    waits, error = asked_in_process(model, monkeypatch, Refusing(9))
    assert isinstance(error, openai.RateLimitError) and error.code == "latency_bound" and len(waits) == 2


def test_a_loading_engine_is_asked_again(model, monkeypatch):
    waits, error = asked_in_process(model, monkeypatch, None)
    assert isinstance(error, openai.InternalServerError) and error.status_code == 503 and error.code == "loading"
    assert waits == [5, 5]


def test_a_wrong_key_is_an_authentication_error(model, monkeypatch):
    waits, error = asked_in_process(model, monkeypatch, Refusing(0), keys=["right"], key="wrong")
    assert isinstance(error, openai.AuthenticationError) and error.code == "invalid_api_key" and not waits
    assert asked_in_process(model, monkeypatch, Refusing(0), keys=["right"], key="right")[1].usage.total_tokens == 3
