"""Tool calls over HTTP: whole loops of a call and an answer, and calls that are forced on random weights."""

import json
import random

import numpy as np
import pytest

from tests.xserver.http.test_completions import events
from tests.xserver.scripted import ARGUMENTS, TEXT
from xcore.requests.grammar import Grammars
from xcore.requests.request import Request
from xcore.tokenizer import load_tokenizer
from xrunner.models.create import create_model
from xserver.text.tool_grammar import Thinking, answer_grammar

PATH = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOT_A_TOOL = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "other"}}]},
}
ASK = [{"role": "user", "content": "How is the weather in Rome?"}]


def posted(server, **body):
    status, _, data = server.post(PATH, {"messages": ASK, "max_tokens": 300} | body)
    assert status == 200, data
    return json.loads(data)


def assembled(chunks):
    """The message and the reason that the chunks of a stream add up to."""
    message, calls, reason = {"content": ""}, {}, None
    for chunk in chunks:
        for choice in chunk["choices"]:
            message["content"] += choice["delta"].get("content") or ""
            assert len(choice["delta"].get("tool_calls", ())) <= 1  # some clients read only the first
            for delta in choice["delta"].get("tool_calls", ()):
                call = calls.setdefault(delta["index"], {"id": "", "name": "", "arguments": ""})
                call["id"] += delta.get("id", "")
                call["name"] += delta["function"].get("name", "")
                call["arguments"] += delta["function"]["arguments"]
            reason = choice["finish_reason"] or reason
    return message | {"tool_calls": list(calls.values())}, reason


def test_a_call_and_then_its_answer_whole_and_streamed(scripted):
    whole = posted(scripted, tools=[WEATHER])
    (choice,) = whole["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert call["type"] == "function" and call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS and call["id"].startswith("call_")
    chunks = events(scripted.post(PATH, {"messages": ASK, "tools": [WEATHER], "stream": True})[2])
    streamed, reason = assembled(chunks)
    assert reason == "tool_calls" and streamed["content"] == ""
    assert [(c["name"], json.loads(c["arguments"])) for c in streamed["tool_calls"]] == [("get_weather", ARGUMENTS)]
    told = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
    answer = posted(scripted, tools=[WEATHER], messages=[*ASK, choice["message"], told])["choices"][0]
    assert answer["message"]["content"] == TEXT and answer["finish_reason"] == "stop"
    assert "tool_calls" not in answer["message"]


@pytest.mark.parametrize("body", [{}, {"tools": [WEATHER], "tool_choice": "none"}])
def test_without_tools_or_with_none_chosen_a_call_is_text(scripted, body):
    choice = posted(scripted, **body | {"max_tokens": 3})["choices"][0]
    assert choice["message"]["content"].startswith("<tool_call>") and "tool_calls" not in choice["message"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_required_call_is_made_by_random_weights(unscripted, choice):
    enum = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    tool = {"type": "function", "function": WEATHER["function"] | {"parameters": enum, "strict": True}}
    body = {"tools": [tool], "tool_choice": choice, "parallel_tool_calls": False, "seed": 1}
    answer = posted(unscripted, **body)["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    assert answer["finish_reason"] == "tool_calls"
    assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")


def test_of_the_tools_that_a_prompt_shows_only_allowed_ones_are_called(unscripted):
    none = {"type": "object", "properties": {}, "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": name, "parameters": none}} for name in "abc"]
    for seed in range(4):
        allowed = [{"type": "function", "function": {"name": name}} for name in "bc"[seed % 2 :]]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": allowed}}
        body = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False, "seed": seed}
        (call,) = posted(unscripted, **body)["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] in {tool["function"]["name"] for tool in allowed}
        kind = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "b"}]}
        asked = {"input": "a", "tools": [{"type": "function", "name": n, "parameters": none} for n in "abc"]}
        status, _, data = unscripted.post("/v1/responses", asked | {"tool_choice": kind, "max_output_tokens": 300})
        answer = json.loads(data)
        assert status == 200 and answer["tool_choice"] == kind
        assert {item["name"] for item in answer["output"] if item["type"] == "function_call"} == {"b"}


def schema(rng):
    """A random schema of arguments, whose values are short."""
    kinds = [
        lambda: {"type": "integer", "minimum": 0, "maximum": 99},
        lambda: {"type": "boolean"},
        lambda: {"enum": [rng.choice("abc") * n for n in range(1, 4)]},
        lambda: {"type": "string", "maxLength": rng.randint(1, 6)},
        lambda: {"type": "array", "items": {"type": "boolean"}, "maxItems": rng.randint(1, 3), "uniqueItems": False},
        lambda: {"type": ["null", "boolean"]},
    ]
    names = [f"key_{i}" for i in range(rng.randint(1, 4))]
    keys = {name: rng.choice(kinds)() for name in names}
    return {"type": "object", "properties": keys, "required": names, "additionalProperties": False}


@pytest.mark.slow
def test_200_calls_over_30_schemas_follow_them(unscripted):
    jsonschema = pytest.importorskip("jsonschema_rs")
    rng = random.Random(0)
    schemas = [schema(rng) for _ in range(30)]
    for number in range(200):
        parameters = schemas[number % 30]
        tool = {
            "type": "function",
            "function": {"name": f"tool_{number % 30}", "parameters": parameters, "strict": True},
        }
        body = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "seed": number}
        if number % 2:
            chunks = events(unscripted.post(PATH, {"messages": ASK, "stream": True, "max_tokens": 400} | body)[2])
            message, reason = assembled(chunks)
            ((name, arguments),) = [(call["name"], call["arguments"]) for call in message["tool_calls"]]
        else:
            choice = posted(unscripted, **body)["choices"][0]
            reason = choice["finish_reason"]
            ((name, arguments),) = [tuple(call["function"].values()) for call in choice["message"]["tool_calls"]]
        assert reason == "tool_calls" and name == tool["function"]["name"]
        jsonschema.validator_for(parameters).validate(json.loads(arguments))


def test_several_calls_follow_each_other_where_they_are_allowed(unscripted):
    none = {"type": "object", "properties": {}, "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "now", "parameters": none}}
    body = {"tools": [tool], "tool_choice": "required", "logit_bias": {"256": -100}, "max_tokens": 120}
    several = posted(unscripted, **body)["choices"][0]
    assert len(several["message"]["tool_calls"]) > 1 and several["finish_reason"] == "length"
    one = posted(unscripted, **body, parallel_tool_calls=False)["choices"][0]["message"]["tool_calls"]
    assert len(one) == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": NOT_A_TOOL}, "tool_choice"),
        ({"tools": [WEATHER], "structured_outputs": {"grammar": 'start: "a"'}}, "structured_outputs"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f"}}]}]}, "messages"),
        ({"structured_outputs": {"regex": "a"}, "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_grammar": "a ::= ("}, "guided_grammar"),
    ],
)
def test_tools_that_contradict_each_other_are_refused(scripted, body, param):
    status, _, data = scripted.post(PATH, {"messages": ASK} | body)
    assert (status, json.loads(data)["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("body", "allowed"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, ("yes", "no")),
        ({"guided_choice": ["left", "right"]}, ("left", "right")),
        ({"guided_regex": "[ab]/c"}, ("a/c", "b/c")),
        ({"guided_regex": r"[ab]\/c"}, ("a/c", "b/c")),
        ({"guided_choice": ["\U0001f600 é"]}, ("\U0001f600 é",)),
        ({"guided_choice": [f"x{i}" for i in range(4096)]}, tuple(f"x{i}" for i in range(4096))),
        ({"guided_choice": ['\x7f\n"/\\{']}, ('\x7f\n"/\\{',)),
        ({"guided_choice": ["", ""]}, ("",)),
        ({"guided_json": '{"enum": [1, 2]}'}, ("1", "2")),
        ({"structured_outputs": {"grammar": 'root ::= "x" | "y"'}}, ("x", "y")),
        ({"structured_outputs": {"grammar": 'start: "x" | "y"'}}, ("x", "y")),
    ],
)
def test_formats_of_vllm_are_followed(unscripted, body, allowed):
    assert posted(unscripted, **body)["choices"][0]["message"]["content"] in allowed
    status, _, data = unscripted.post("/v1/completions", {"prompt": "a"} | body)
    assert status == 200 and json.loads(data)["choices"][0]["text"] in allowed


@pytest.mark.parametrize("stream", [False, True])
def test_a_format_that_can_not_be_completed_is_the_fault_of_its_body(unscripted, stream):
    endless = {"structured_outputs": {"grammar": 'start: "a" start'}, "stream": stream}
    status, _, data = unscripted.post(PATH, {"messages": ASK, "max_tokens": 300} | endless)
    document = data.partition(b"data: ")[2].partition(b"\n")[0] if stream else data
    error = json.loads(document)["error"]
    assert status == (200 if stream else 400)
    assert error["code"] == "invalid_value" and "can't be followed any further" in error["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"tool_choice": {"type": "function"}}, "'tool_choice.function' is missing"),
        ({"tool_choice": {"name": "f"}}, "'tool_choice.type' is missing"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
            "'tool_choice.allowed_tools.tools' is missing",
        ),
        ({"tool_choice": "any"}, "'tool_choice' should be"),
        ({"stop": {"a": 1}}, "'stop' must be a text or a list"),
        ({"guided_json": 5}, "'guided_json' must be an object or a text"),
    ],
)
def test_errors_of_keys_with_several_types_do_not_name_the_types(scripted, body, words):
    status, _, data = scripted.post(PATH, {"messages": ASK} | body)
    assert status == 400 and words in json.loads(data)["error"]["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "'tools.0.type' should be 'function'"),
        ({"tool_choice": {"type": "custom"}}, "'tool_choice.type' should be 'function' or 'allowed_tools'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]},
            "'messages.0.content.0.type' should be 'text'",
        ),
    ],
)
def test_of_an_object_whose_type_is_not_supported_only_the_type_is_named(scripted, body, words):
    status, _, data = scripted.post(PATH, {"messages": ASK} | body)
    assert status == 400 and json.loads(data)["error"]["message"] == f"{words}: this server supports no other type."


@pytest.mark.parametrize(
    ("begun", "text", "follows"),
    [
        (False, "", True),
        (False, " ", False),
        (False, "<think>a</think>\n\n", True),
        (False, "<think>a</think>" + 5 * " ", False),
        (True, "a</think> ", True),
        (True, "", False),
    ],
)
def test_white_space_before_an_answer_follows_its_reasoning_only(tmp_path, begun, text, follows):
    """Without reasoning it would be a part of the answer, which must be one of the choices."""
    directory = tmp_path / "tiny"
    create_model(directory, "llama", layers=1, hidden=32, heads=2, kv_heads=1, ffn=64, vocab=300, context=64, seed=0)
    tokenizer = load_tokenizer(directory)
    grammars = Grammars(directory / "tokenizer.json", frozenset(), 300)
    lark = answer_grammar("/x/", Thinking('"<think>"', '"</think>"', begun))
    state = grammars.start(Request("", (1,), 9, grammar=lark))
    allowed = True
    for token in tokenizer.encode(text + "x", add_special_tokens=False).ids:
        allowed = bool(state.mask().view(np.uint32)[token // 32] >> np.uint32(token % 32) & 1)
        if not allowed:
            break
        state.consume(token)
    ended = allowed and state.complete
    assert ended == follows
