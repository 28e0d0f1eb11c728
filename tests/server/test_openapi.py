"""/openapi.json describes the server: bodies made from it are answered as it says."""

import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exegpt.server.responses import ChatChunk, TextCompletion
from tests.server.test_completions import events

schemathesis = pytest.importorskip("schemathesis")
GenerationMode = schemathesis.GenerationMode
CHECKS = [
    schemathesis.checks.not_a_server_error,
    schemathesis.checks.status_code_conformance,
    schemathesis.checks.content_type_conformance,
    schemathesis.checks.response_schema_conformance,
]
OPERATIONS = [
    *(f"GET {path}" for path in ("/health", "/ready", "/version", "/schedule", "/v1/models", "/v1/models/{name}")),
    *(f"POST {path}" for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")),
]


@pytest.fixture(scope="module")
def document(server):
    return schemathesis.openapi.from_url(server.url + "/openapi.json")


@schemathesis.hook
def map_body(context, body):
    """Bodies name the model, if any, and ask for short answers: 128 choices of all the context take their time."""
    if not isinstance(body, dict):
        return body
    named = {key: "tiny" if key == "model" and isinstance(value, str) else value for key, value in body.items()}
    if "completions" in context.operation.path:
        named |= {"max_tokens": 3} if type(named.get("max_tokens", 0)) is int else {}
        named |= {"n": 2} if type(named.get("n")) is int and named["n"] > 2 else {}
    return named


@pytest.mark.parametrize("operation", OPERATIONS)
def test_answers_are_as_described(document, operation):
    method, path = operation.split()
    made = document[path][method]
    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) if method == "POST" else (GenerationMode.POSITIVE,)

    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.one_of(made.as_strategy(generation_mode=mode) for mode in modes))
    def answered(case):
        statuses.append(case.call_and_validate(checks=CHECKS).status_code)

    statuses: list[int] = []
    answered()
    assert 200 in statuses or "{" in path


def test_every_operation_is_tried(document):
    paths = document.raw_schema["paths"].items()
    assert {f"{method.upper()} {path}" for path, methods in paths for method in methods} == set(OPERATIONS)


def test_all_references_resolve(server):
    text = server.get("/openapi.json")[2].decode()
    names = json.loads(text)["components"]["schemas"]
    assert set(re.findall(r'"#/components/schemas/(\w+)"', text)) <= set(names)


def test_events_are_as_described(server):
    body = {"stream": True, "max_tokens": 4, "return_token_ids": True, "stream_options": {"include_usage": True}}
    talk = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2}
    chunks = events(server.post("/v1/chat/completions", body | talk)[2])
    completions = events(server.post("/v1/completions", body | {"prompt": "a", "logprobs": 2, "echo": True})[2])
    assert len(chunks) > 2 and len(completions) > 1  # a piece, its end and the usage at least
    for event in chunks:
        ChatChunk.model_validate(event)
    for event in completions:
        TextCompletion.model_validate(event)
