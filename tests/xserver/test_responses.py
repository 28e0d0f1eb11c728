"""`POST /v1/responses`, raw and with OpenAI's client: texts, calls and their outputs, formats, and streams' events."""

import asyncio
import json

import pytest

from tests.xserver.scripted import ARGUMENTS, TEXT
from tests.xserver.test_tools import WEATHER
from xserver.http.api_error import ApiError
from xserver.http.responses_answer import ResponsesAnswer
from xserver.http.responses_schemas import ResponsesRequest, chat_of
from xserver.http.schemas import parsed

PATH = "/v1/responses"
TOOL = {"type": "function"} | WEATHER["function"]
SPACE = {"type": "namespace", "name": "sky", "description": "The sky.", "tools": [TOOL]}
CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
SHAPE = {"type": "json_schema", "name": "side", "schema": {"enum": ["left", "right"]}, "strict": True}


def posted(server, **body):
    status, _, data = server.post(PATH, {"input": "How is the weather in Rome?"} | body)
    assert status == 200, data
    return json.loads(data)


def events(data: bytes):
    """The events of a stream; each names its type twice, and their numbers are in order."""
    found = []
    for block in data.decode().strip().split("\n\n"):
        name, document = block.split("\n")
        found.append(json.loads(document.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def test_a_call_and_then_its_answer(scripted):
    first = posted(scripted, tools=[TOOL], store=True, instructions="Be kind.")
    (call,) = first["output"]
    assert first["status"] == "completed" and first["store"] is False and first["object"] == "response"
    assert call["type"] == "function_call" and json.loads(call["arguments"]) == ARGUMENTS
    told = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    second = posted(scripted, tools=[TOOL], input=[{"role": "user", "content": "How is it?"}, call, told])
    (message,) = second["output"]
    assert message["content"] == [{"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}]
    usage = second["usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"] and usage["output_tokens"] == 2
    assert usage["input_tokens_details"]["cached_tokens"] == 0


def test_the_events_of_a_call_come_in_their_order(scripted):
    found = events(scripted.post(PATH, {"input": "Rome?", "tools": [TOOL], "stream": True})[2])
    names = [event["type"].removeprefix("response.") for event in found]
    deltas = names.count("function_call_arguments.delta")
    assert names == [
        *("created", "in_progress", "output_item.added"),
        *["function_call_arguments.delta"] * deltas,
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    arguments = "".join(event["delta"] for event in found if event["type"].endswith("arguments.delta"))
    assert json.loads(arguments) == ARGUMENTS and found[-1]["response"]["output"][0]["arguments"] == arguments


def test_functions_of_a_namespace_are_called_and_answered_under_its_name(scripted):
    asked = {"tools": [SPACE], "tool_choice": "required", "max_tool_calls": 3, "client_metadata": {"turn": "1"}}
    first = posted(scripted, **asked)
    (call,) = first["output"]
    assert (call["namespace"], call["name"]) == ("sky", "get_weather") and json.loads(call["arguments"]) == ARGUMENTS
    assert first["tools"] == [SPACE] and first["max_tool_calls"] == 3
    told = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    second = posted(scripted, input=[{"role": "user", "content": "How is it?"}, call, told], tools=[SPACE])
    assert second["output"][0]["content"][0]["text"] == TEXT
    chat = chat_of(parsed(ResponsesRequest, {"input": [call, told], "tools": [SPACE]}))
    assert chat.messages[0].tool_calls[0].function.name == chat.tools[0].function.name == "sky.get_weather"
    assert chat.tools[0].function.description == "The sky.\nWeather of a city."


def test_included_log_probabilities_come_with_the_text(unscripted):
    asked = {"include": ["reasoning.encrypted_content", "message.output_text.logprobs"], "max_output_tokens": 6}
    found = events(unscripted.post(PATH, {"input": "a", "stream": True, "seed": 1} | asked)[2])
    texts = [event for event in found if event["type"].startswith("response.output_text.")]
    parts, done = texts[:-1], texts[-1]
    assert len(done["logprobs"]) == 6 and all(entry["top_logprobs"] == [] for entry in done["logprobs"])
    assert done["logprobs"] == found[-1]["response"]["output"][0]["content"][0]["logprobs"]
    assert [entry for part in parts for entry in part["logprobs"]] == done["logprobs"]


def test_the_events_of_a_text_come_in_their_order(scripted):
    told = {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "sunny"}]}
    call = {"type": "function_call", "call_id": "a", "name": "get_weather", "arguments": "{}"}
    found = events(scripted.post(PATH, {"input": [call, told], "stream": True})[2])
    names = [event["type"].removeprefix("response.") for event in found]
    assert names == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert found[5]["text"] == TEXT and found[-1]["response"]["usage"]["output_tokens"] == 2


def test_formats_and_limits(unscripted):
    answer = posted(unscripted, text={"format": SHAPE}, top_logprobs=1)
    content = answer["output"][0]["content"][0]
    assert json.loads(content["text"]) in ("left", "right") and content["logprobs"]
    cut = posted(unscripted, max_output_tokens=3)
    assert cut["status"] == "incomplete" and cut["incomplete_details"] == {"reason": "max_output_tokens"}
    assert cut["usage"]["output_tokens"] == 3


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "as clients do that are set to 'store': false."),
        ({"truncation": "auto"}, "truncation", 'leave it out or send "disabled".'),
        ({"include": ["thoughts"]}, "include", "'include.0' should be"),
        ({"tools": [SPACE | {"name": "s" * 54}]}, "tools", "'tools.0' has a function whose name with the namespace's"),
        (
            {"tools": [SPACE | {"parameters": {"type": "object"}}]},
            "tools",
            "is a namespace, which has no",
        ),
        ({"tools": [TOOL | {"tools": [TOOL]}]}, "tools", "'tools.0' is a function, which has no 'tools'"),
        ({"background": True}, "background", "keeps no responses"),
        ({"conversation": "conv_1"}, "conversation", "keeps no conversations"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input", "'input.0' is a call without 'call_id'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "input.0.content.0.type"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools.0"),
        ({"tool_choice": "required"}, "tool_choice", "no functions"),
        ({"input": "a " * 9000}, "input", "maximum context length"),
        ({"max_output_tokens": 900000}, "max_output_tokens", "maximum context length"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "'input' makes 0 messages"),
        ({"input": [CALL] * 129}, "input", "'input.128' is one of more than 128 calls"),
        ({"input": [CALL | {"name": ""}]}, "input", "'input.0.name'"),
        ({"input": [CALL | {"name": "a" * 200, "namespace": "b" * 64}]}, "input", "'input.0' has a name of more than"),
        ({"input": [{"role": "user", "content": "a"}] * 4096, "instructions": "b"}, "input", "4097 messages"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format", "'text.format.schema' is missing"),
        ({"text": {"format": SHAPE | {"schema": {"type": "foo"}}}}, "text.format", "Invalid type"),
    ],
)
def test_what_is_not_served_is_refused_with_the_reason(scripted, body, param, words):
    status, _, data = scripted.post(PATH, {"input": "a"} | body)
    error = json.loads(data)["error"]
    assert (status, error["param"]) == (400, param) and words in error["message"]


def test_responses_are_not_kept(scripted):
    status, _, data = scripted.get(PATH + "/resp_1")
    assert status == 404 and "keeps no responses" in json.loads(data)["error"]["message"]
    status, _, data = scripted.post(PATH + "/input_tokens", {"input": "a"})
    assert status == 404 and "POST /tokenize counts" in json.loads(data)["error"]["message"]


def test_openai_client_reads_responses_and_streams(scripted):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=scripted.url + "/v1", api_key="none", max_retries=0) as client:
        first = client.responses.create(model="scripted", input="Rome?", tools=[TOOL])
        (call,) = first.output
        told = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        conversation = [{"role": "user", "content": "Rome?"}, *first.output, told]
        second = client.responses.create(model="scripted", input=conversation, tools=[TOOL])
        assert second.output_text == TEXT
        with client.responses.stream(model="scripted", input=conversation, tools=[TOOL]) as stream:
            kinds = {event.type for event in stream}
            assert stream.get_final_response().output_text == TEXT
        assert {"response.created", "response.output_text.delta", "response.completed"} <= kinds


def test_a_seed_repeats_a_response(unscripted):
    texts = [posted(unscripted, max_output_tokens=8, seed=seed)["output"] for seed in (3, 3, 4)]
    contents = [output[0]["content"][0]["text"] for output in texts]
    assert contents[0] == contents[1] != contents[2]


def test_the_events_of_an_error_continue_the_numbers():
    async def failing():
        yield {"type": "response.created"}
        yield {"type": "response.in_progress"}
        raise ApiError(500, "An internal error ended the request.", "internal_error")

    async def numbers():
        made = ResponsesAnswer.__new__(ResponsesAnswer)
        made._number, made._events, made._items = 0, failing, []
        made._response = lambda items, reason: {"output": items}
        found = []
        try:
            async for event in made.chunks():
                found.append(event)
        except ApiError as error:
            found += [json.loads(line[6:]) for line in made.failure(error).splitlines() if line.startswith(b"data: ")]
        return found

    found = asyncio.run(numbers())
    kinds = ["response.created", "response.in_progress", "error", "response.failed"]
    assert [(event["type"], event["sequence_number"]) for event in found] == list(zip(kinds, range(4), strict=True))
    reason = {"code": "server_error", "message": "An internal error ended the request."}
    assert found[-1]["response"] == {"output": [], "status": "failed", "error": reason}
