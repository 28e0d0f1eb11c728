"""Completions: the API's tokens are transformers', whole and streamed, and errors have OpenAI's shape."""

import json
from dataclasses import replace

import pytest

from tests.xserver.engines.test_server_unit import frontends
from xcore.requests.requests import check_request
from xserver.engines.engine_link import EngineLink
from xserver.http.api import make_answer
from xserver.http.api_error import ApiError

UNCACHED = {"prompt_tokens_details": {"cached_tokens": 0}}
"""The usage's part of a server without a cache of prefixes."""


def expected(model, prompt, count):
    """Transformers' own greedy tokens."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.tensor([prompt])
    out = theirs.generate(ids, max_new_tokens=count, do_sample=False, attention_mask=torch.ones_like(ids))
    return out[0, len(prompt) :].tolist()


def events(data: bytes):
    """The documents of a stream, which ends with [DONE]."""
    lines = [line.removeprefix("data: ") for line in data.decode().split("\n\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_greedy_tokens_are_transformers(server, model):
    prompts = [[5, 9, 200, 31], [77, 12], list(range(40))]
    body = {"prompt": prompts, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    status, _, data = server.post("/v1/completions", body)
    answer = json.loads(data)
    assert status == 200
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        assert choice["token_ids"] == expected(model, prompt, 12)
        assert choice["prompt_token_ids"] == prompt and choice["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 46, "completion_tokens": 36, "total_tokens": 82} | UNCACHED


def test_streamed_text_is_the_whole_text(server):
    body = {"prompt": "Hello, world", "max_tokens": 30, "temperature": 0.8, "seed": 3, "n": 2, "ignore_eos": True}
    whole = json.loads(server.post("/v1/completions", body)[2])["choices"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    status, headers, data = server.post("/v1/completions", body | options)
    assert status == 200 and headers["content-type"] == "text/event-stream; charset=utf-8"
    chunks = events(data)
    *pieces, last = chunks
    for choice in whole:
        own = [c["choices"][0] for c in pieces if c["choices"][0]["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"]
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["length"]
    assert whole[0]["text"] != whole[1]["text"]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 60
    assert all(c["usage"] is None for c in pieces) and len({c["id"] for c in chunks}) == 1


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        ({"prompt": "a", "max_tokens": "5"}, 400, "max_tokens", "invalid_value"),
        ({"prompt": "a", "unheard": 5}, 400, "unheard", "unsupported_parameter"),
        ({"prompt": "a", "suffix": "b"}, 400, "suffix", "unsupported_parameter"),
        ({"prompt": "a", "metadata": {"run": 5}}, 400, "metadata", "invalid_value"),
        ({"prompt": "a", "metadata": {"unit": ""}}, 400, "metadata", "invalid_value"),
        ({"prompt": "a", "metadata": {"deadline_s": "soon"}}, 400, "metadata", "invalid_value"),
        ({"max_tokens": 5}, 400, "prompt", "invalid_value"),
        ({"prompt": "a", "temperature": 3}, 400, "temperature", "invalid_value"),
        ({"prompt": "a", "max_tokens": 500}, 400, "max_tokens", "context_length_exceeded"),
        ({"prompt": [1] * 200}, 400, "prompt", "context_length_exceeded"),
        ({"prompt": [100000]}, 400, "prompt", "invalid_value"),
        ({"prompt": "x" * 100_000}, 400, "prompt", "context_length_exceeded"),
        ({"prompt": "a", "model": "other"}, 404, "model", "model_not_found"),
        (b'{"prompt": NaN}', 400, None, "invalid_value"),
        (b'{"prompt": "\xff"}', 400, None, "invalid_value"),
        (b"[" * 70_000, 400, None, "invalid_value"),
        (b'{"prompt": "\\ud800"}', 400, None, "invalid_value"),
        (b'{"max_tokens": ' + b"9" * 10_000 + b"}", 400, None, "invalid_value"),
        (b"[1]", 400, None, "invalid_value"),
        (b"nothing", 400, None, "invalid_value"),
    ],
)
def test_bad_bodies_are_refused_in_openais_shape(server, body, status, param, code):
    got, _, data = server.post("/v1/completions", body)
    error = json.loads(data)["error"]
    assert (got, error["param"], error["code"]) == (status, param, code)
    assert error["type"] == "invalid_request_error" and len(error["message"]) < 300


EXTREMES = {
    "temperature": (0, 1e-9, 2),
    "top_p": (0, 1e-9, 1),
    "top_k": (-1, 0, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (1e-9, 1e-4, 10),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "logit_bias": ({"0": -100}, {"1": 100}),
    "seed": (-(2**63), 2**63 - 1),
    "logprobs": (0, 20),
    "min_tokens": (0, 4),
    "echo": (True,),
    "n": (1, 128),
}


@pytest.mark.parametrize("encoder_layers", [0, 2])
@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in EXTREMES.items() for value in values])
def test_the_engine_runs_whatever_the_server_accepts(model, encoder_layers, key, value):
    """It says no more than that a request is too long."""
    (frontend,) = frontends(model, EngineLink())
    spec = replace(frontend.model.spec, encoder_layers=encoder_layers)
    frontend.model = replace(frontend.model, spec=spec)
    for more in ({}, {"echo": True, "logprobs": 1}):
        try:
            made = make_answer("/v1/completions", {"prompt": [5], "max_tokens": 4} | more | {key: value}, frontend, "")
            made.prepare(frontend)
        except ApiError as error:
            assert error.status == 400 and error.code == "invalid_value"
        else:
            for choice in made.choices:
                check_request(choice.request, spec)


def test_more_sequences_than_may_ever_wait_are_not_worth_a_retry(server):
    """The server refuses them however idle it is."""
    status, headers, data = server.post("/v1/completions", {"prompt": ["a"] * 10, "n": 128})
    error = json.loads(data)["error"]
    assert (status, error["code"], headers["x-should-retry"]) == (429, "concurrency_limit", "false")
    assert "retry-after" not in headers and "1,280 sequences" in error["message"]


def test_every_path_has_errors_of_one_shape(server):
    for status, answer in (
        (404, server.get("/v1/nothing")),
        (405, server.get("/v1/completions")),
        (415, server.post("/v1/completions", b"a=b", Content_Type="application/x-www-form-urlencoded")),
        (415, server.post("/v1/completions", {"prompt": "a"}, Content_Encoding="br")),
        (413, server.post("/v1/completions", b"x" * (17 * 2**20))),
        (403, server.get("/v1/models", Host="evil.example")),
        (403, server.get("/v1/models", Origin="http://evil.example")),
        (404, server.get("/v1/models/other/name")),
    ):
        assert answer[0] == status
        assert set(json.loads(answer[2])["error"]) == {"message", "type", "param", "code"}


def test_models_have_cards_and_requests_ids(server):
    status, headers, data = server.get("/v1/models", X_Request_Id="abc-1")
    (card,) = json.loads(data)["data"]
    assert status == 200 and card["id"] == "tiny" and card["max_model_len"] == 128
    assert headers["x-request-id"] == "abc-1"
    assert json.loads(server.get("/v1/models/tiny")[2]) == card
    assert len(server.get("/health", X_Request_Id="no spaces please")[1]["x-request-id"]) == 24
    _, headers, data = server.post("/v1/completions", {"prompt": [5], "max_tokens": 1})
    assert json.loads(data)["id"] == f"cmpl-{headers['x-request-id']}"


def test_a_stop_text_ends_the_output_and_is_left_out(server):
    body = {"prompt": "Hello", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    text = json.loads(server.post("/v1/completions", body)[2])["choices"][0]["text"]
    stop = text[4:6]
    choice = json.loads(server.post("/v1/completions", body | {"stop": [stop]})[2])["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["text"] == text[: text.index(stop)]
    streamed = events(server.post("/v1/completions", body | {"stop": stop, "stream": True})[2])
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == choice["text"]


def test_a_stop_token_ends_the_output_without_text_unless_asked_for(server):
    body = {"prompt": "Hello", "max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    whole = json.loads(server.post("/v1/completions", body)[2])["choices"][0]
    stop = next(i for i in whole["token_ids"] if i < 256)
    end = whole["token_ids"].index(stop) + 1
    answer = json.loads(server.post("/v1/completions", body | {"stop_token_ids": [stop]})[2])
    choice = answer["choices"][0]
    assert choice["token_ids"] == whole["token_ids"][:end] and choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == end
    included = body | {"stop_token_ids": [stop], "include_stop_str_in_output": True}
    with_text = json.loads(server.post("/v1/completions", included)[2])["choices"][0]["text"]
    assert len(with_text) == len(choice["text"]) + 1 and with_text.startswith(choice["text"].rstrip("\ufffd"))


@pytest.mark.parametrize(
    "extreme",
    [
        {"seed": -(2**63)},
        {"seed": 2**63 - 1, "n": 3},
        {"temperature": 2, "top_p": 0, "top_k": -1, "min_p": 1},
        {"temperature": 1e-30, "repetition_penalty": 10},
        {"frequency_penalty": -2, "presence_penalty": 2, "logit_bias": {"299": -100, "0": 100}},
        {"max_tokens": 3.0, "min_tokens": 3, "stop": ["x" * 1024] * 16, "stop_token_ids": [0, 0]},
        {"metadata": {"application": "a", "run": "1", "unit": "u", "deadline_s": "2.5", "other": [1]}},
        {"user": "a", "metadata": {}, "tool_choice": "none", "priority": 5, "best_of": None},
    ],
)
def test_extreme_values_are_answered(server, extreme):
    status, _, data = server.post("/v1/completions", {"prompt": "a", "max_tokens": 4} | extreme)
    assert status == 200, data
    assert len(json.loads(data)["choices"]) == extreme.get("n", 1)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/tiny", "/health", "/metrics", "/version"])
def test_head_works_wherever_get_does(server, path):
    status, headers, body = server.send("HEAD", path, None)
    assert status == 200 and body == b"" and headers["content-type"] == server.get(path)[1]["content-type"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": [1] * 127, "max_tokens": 2}),
        ("completions", {"prompt": [1] * 129, "stream": True}),
        ("completions", {"prompt": "a" * 100_000}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a" * 200}]}),
    ],
)
def test_a_request_beyond_the_context_has_the_words_that_clients_search_for(server, path, body):
    status, _, data = server.post(f"/v1/{path}", body)
    error = json.loads(data)["error"]
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "This model's maximum context length is 128 tokens" in error["message"]
