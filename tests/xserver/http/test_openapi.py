"""/openapi.json describes the server: bodies made from it are answered as it says."""

import json
import os
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.xserver.http.test_completions import events
from xserver.http.responses import ChatChunk, TextCompletion

schemathesis = pytest.importorskip("schemathesis")
jsonschema = pytest.importorskip("jsonschema_rs")
GenerationMode = schemathesis.GenerationMode
CHECKS = [
    schemathesis.checks.not_a_server_error,
    schemathesis.checks.status_code_conformance,
    schemathesis.checks.content_type_conformance,
    schemathesis.checks.response_schema_conformance,
]
OPERATIONS = [
    *(f"GET /{path}" for path in "health ready version schedule tokenizer_info v1/models v1/models/{name}".split()),
    *(
        f"POST {path}"
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize")
    ),
]


EXAMPLES = 60 if os.environ.get("EXEGPT_TESTS") == "all" else 12
"""Bodies of each operation; `make test-all` sends more."""
FORMATS = (
    "response_format structured_outputs guided_json guided_regex guided_choice guided_grammar tools tool_choice".split()
)
SHORTEST = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}
"""Bodies that are accepted."""
ADMINISTERED = ["POST /schedule", "POST /drain"]
"""Of a server with an administrator's token alone."""


@pytest.fixture(scope="module")
def document(server):
    return schemathesis.openapi.from_url(server.url + "/openapi.json")


@pytest.fixture(scope="module")
def its_document(administered):
    return schemathesis.openapi.from_url(administered.url + "/openapi.json")


@schemathesis.hook
def map_body(context, body):
    """Bodies name the model, if any, and ask for short answers: 128 choices of all the context take their time."""
    if not isinstance(body, dict):
        return body
    named = {key: "tiny" if key == "model" and isinstance(value, str) else value for key, value in body.items()}
    if "completions" in context.operation.path:
        named |= {"max_tokens": 3} if type(named.get("max_tokens", 0)) is int else {}
        named |= {"n": 2} if type(named.get("n")) is int and named["n"] > 2 else {}
        if len(named) % 2:  # two formats of an output are refused, and random ones nearly always
            named = {key: value for key, value in named.items() if key not in FORMATS}
        if isinstance(named.get("messages"), list):
            named["messages"] = [_with_content(message) for message in named["messages"]]
    return named


def _with_content(message):
    """Every message of a conversation has a content, unless it calls tools: a rule that the description can't have."""
    return {"content": "a"} | message if isinstance(message, dict) else message


@pytest.mark.parametrize("operation", OPERATIONS)
def test_answers_are_as_described(document, operation):
    method, path = operation.split()
    made = document[path][method]
    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE) if method == "POST" else (GenerationMode.POSITIVE,)

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.one_of(made.as_strategy(generation_mode=mode) for mode in modes))
    def answered(case):
        statuses.append(case.call_and_validate(checks=CHECKS).status_code)

    statuses: list[int] = []
    answered()
    if path in SHORTEST:  # all that is drawn may break a rule that no schema has
        shortest = made.Case(body=SHORTEST[path], media_type="application/json")
        statuses.append(shortest.call_and_validate(checks=CHECKS).status_code)
    assert 200 in statuses or "{" in path


def operations(document):
    paths = document.raw_schema["paths"].items()
    return {f"{method.upper()} {path}" for path, methods in paths for method in methods}


def test_every_operation_is_tried(document, its_document):
    assert operations(document) == set(OPERATIONS)
    assert operations(its_document) == {*OPERATIONS, *ADMINISTERED}


@pytest.mark.parametrize("token", [None, "wrong", "secret"])
@pytest.mark.parametrize("operation", ADMINISTERED)
def test_administration_is_as_described(its_document, administered, operation, token):
    """Bodies made from the description are no schedules of this model, but for a few; nothing drains."""
    method, path = operation.split()
    made = its_document[path][method]
    assert made.definition.raw["security"] == [{"AdminToken": []}]
    if operation == "POST /drain" and token == "secret":
        return  # test_the_schedule_and_a_drain_are_accepted_as_described
    statuses = set()

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.one_of(made.as_strategy(generation_mode=mode) for mode in GenerationMode))
    def answered(case):
        case.headers = {name: value for name, value in (case.headers or {}).items() if name != "X-Admin-Token"}
        case.headers |= {"X-Admin-Token": token} if token else {}
        statuses.add(case.call_and_validate(checks=CHECKS).status_code)

    answered()
    assert statuses <= ({400, 413, 415} if token == "secret" else {401})
    assert administered.get("/ready")[0] == 200


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


def test_the_schedule_and_a_drain_are_accepted_as_described(its_document, administered):
    """Last of the tests with this server (conftest.py): it ends."""
    held = json.loads(administered.get("/schedule")[2])["schedule"]
    for path, body in (("/schedule", held), ("/drain", None)):
        made = its_document[path]["POST"]
        headers = {"X-Admin-Token": "secret"}
        case = made.Case(headers=headers, **({"body": body, "media_type": "application/json"} if body else {}))
        assert case.call_and_validate(checks=CHECKS).status_code == 202
    schema = its_document.raw_schema
    described = {"$ref": "#/components/schemas/ScheduleToFollow", "components": schema["components"]}
    jsonschema.validate(described, held)
    assert not jsonschema.is_valid(described, held | {"policy": None})
    assert administered.process.wait(30) == 0
