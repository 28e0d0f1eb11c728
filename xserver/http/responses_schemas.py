"""The body of `POST /v1/responses`, and its conversion to a chat."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from xserver.http.api_error import invalid
from xserver.http.schemas import (
    MAX_CALLED,
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_NAME,
    MAX_TOOLS,
    ChatRequest,
    Document,
    FunctionTool,
    Salt,
    Seed,
    Whole,
    parsed,
)
from xserver.http.unsupported import RESPONSES


class ContentPart(Document):
    """A text of a message."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str
    annotations: list[object] | None = Field(None, description="Has no effect.")
    logprobs: list[object] | None = Field(None, description="Has no effect.")


Texts = str | list[ContentPart]
LOGPROBS: Literal["message.output_text.logprobs"] = "message.output_text.logprobs"
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""OpenAI's values of `include`: all but the first name parts that no answer of this server has."""


class Item(Document):
    """An item of the input: a message, a function's call or its output, or reasoning."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Texts | None = None
    summary: list[ContentPart] | None = None
    encrypted_content: str | None = Field(None, description="Has no effect.")
    call_id: str | None = Field(None, max_length=256)
    name: str | None = Field(None, min_length=1, max_length=MAX_CALLED)
    arguments: str | None = None
    output: Texts | None = None
    namespace: str | None = Field(None, max_length=64)
    id: str | None = Field(None, description="Has no effect.")
    status: str | None = Field(None, description="Has no effect.")
    phase: str | None = Field(None, description="Has no effect.")


class ResponseFunction(FunctionTool):
    """A function of a namespace."""

    type: Literal["function"]
    defer_loading: bool | None = Field(None, description="Has no effect.")


class ResponseTool(FunctionTool):
    """A function that the model may call, or a namespace of such functions."""

    type: Literal["function", "namespace"]
    defer_loading: bool | None = Field(None, description="Has no effect.")
    tools: Annotated[list[ResponseFunction], Field(max_length=MAX_TOOLS)] | None = None

    @model_validator(mode="after")
    def _check(self) -> "ResponseTool":
        """Check that only a namespace has functions, and that it has no arguments."""
        if self.type == "namespace" and (self.parameters or self.strict):
            raise ValueError("is a namespace, which has no 'parameters' and no 'strict'")
        if self.type == "function" and self.tools:
            raise ValueError("is a function, which has no 'tools'")
        return self


class ChosenTool(Document):
    """The choice of one function."""

    type: Literal["function"]
    name: str


class AllowedChoice(Document):
    """The choice of some functions, and whether one of them must be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(min_length=1, max_length=MAX_TOOLS)]


class TextFormat(Document):
    """The format of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, object] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Document):
    """Options of the text."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Document):
    """Options of the reasoning."""

    effort: str | None = Field(None, max_length=64, description="A variable of the chat template.")
    summary: str | None = Field(None, description="Has no effect.")
    generate_summary: str | None = Field(None, description="Has no effect.")


class ResponseStreamOptions(Document):
    """Options of a stream."""

    include_obfuscation: bool | None = Field(None, description="Has no effect.")


class ResponsesRequest(Document):
    """The body of `POST /v1/responses`."""

    endpoint = RESPONSES
    model: str | None = Field(None, max_length=1024)
    input: str | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Whole | None = Field(None, ge=1, lt=2**31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_logprobs: Whole | None = Field(None, ge=0, le=20)
    seed: Seed = None
    include: list[Included] | None = Field(None, description="Parts to return. Only log-probabilities exist.")
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    max_tool_calls: Whole | None = Field(None, ge=1, description="Has no effect.")  # it counts calls of OpenAI's tools
    tool_choice: (
        Literal["none", "auto", "required"] | Annotated[ChosenTool | AllowedChoice, Field(discriminator="type")] | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = Field(None, description="Responses are never kept: answered as false.")
    metadata: dict[str, object] | None = None
    client_metadata: dict[str, object] | None = Field(None, description="Has no effect.")
    user: str | None = Field(None, description="Has no effect.")
    service_tier: str | None = Field(None, description="Has no effect.")
    safety_identifier: str | None = Field(None, description="Has no effect.")
    cache_salt: Salt = None
    prompt_cache_key: str | None = Field(None, description="Has no effect.")
    prompt_cache_retention: str | None = Field(None, description="Has no effect.")
    prompt_cache_options: dict[str, object] | None = Field(None, description="Has no effect.")


def chat_of(body: ResponsesRequest) -> ChatRequest:
    """Return the chat that a body describes; ApiError for an input that isn't a conversation."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        messages += _messages(body.input)
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise invalid(f"'input' makes {len(messages)} messages: it must make 1 to {MAX_MESSAGES}.", "input")
    wanted = body.text.format if body.text else None
    chat: dict[str, object] = {
        "model": body.model,
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "logprobs": bool(body.top_logprobs) or LOGPROBS in (body.include or ()),
        "top_logprobs": body.top_logprobs,
        "seed": body.seed,
        "tools": _functions(body.tools or ()),
        "tool_choice": _choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _format(wanted) if wanted else None,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "stream": body.stream,
        "cache_salt": body.cache_salt,
        "metadata": body.metadata,
    }
    return parsed(ChatRequest, chat)


def _messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return the messages of items; calls and reasoning join the assistant's message that they belong to."""
    messages: list[dict[str, Any]] = []
    for place, item in enumerate(items):
        where = f"input.{place}"
        if item.type == "message":
            if item.role is None or item.content is None:
                raise invalid(f"'{where}' is a message without a role or a content.", "input")
            last = messages[-1] if messages else {}
            if item.role == "assistant" and last.get("role") == "assistant" and last.get("content") is None:
                last["content"] = _text(item.content)
            else:
                messages.append({"role": item.role, "content": _text(item.content)})
        elif item.type == "function_call_output":
            if item.call_id is None or item.output is None:
                raise invalid(f"'{where}' is a function's output without 'call_id' or 'output'.", "input")
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        else:
            _join(messages, item, where)
    return [message for message in messages if message.get("content") is not None or message.get("tool_calls")]


def _join(messages: list[dict[str, Any]], item: Item, where: str) -> None:
    """Add a call, or reasoning, to the assistant's message."""
    if not messages or messages[-1]["role"] != "assistant" or (item.type == "reasoning" and messages[-1]["content"]):
        messages.append({"role": "assistant", "content": None})
    message = messages[-1]
    if item.type == "reasoning":
        thought = "\n".join(part.text for part in [*(item.summary or ()), *_parts(item.content)])
        if thought:
            message["reasoning_content"] = thought
        return
    if item.call_id is None or item.name is None or item.arguments is None:
        raise invalid(f"'{where}' is a call without 'call_id', 'name' or 'arguments'.", "input")
    name = f"{item.namespace}.{item.name}" if item.namespace else item.name
    if len(name) > MAX_CALLED:
        raise invalid(f"'{where}' has a name of more than {MAX_CALLED} characters.", "input")
    call = {"id": item.call_id, "function": {"name": name, "arguments": item.arguments}}
    calls = message.setdefault("tool_calls", [])
    if len(calls) == MAX_CALLS:
        raise invalid(f"'{where}' is one of more than {MAX_CALLS} calls without other items between them.", "input")
    calls.append(call)


def _parts(content: Texts | None) -> Sequence[ContentPart]:
    return content if isinstance(content, list) else ()


def _text(content: Texts) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def namespaces(body: ResponsesRequest) -> dict[str, tuple[str, str]]:
    """Return the namespace and the name of each function in a namespace, by the name that the model sees."""
    spaces = [tool for tool in body.tools or () if tool.type == "namespace"]
    return {f"{space.name}.{inner.name}": (space.name, inner.name) for space in spaces for inner in space.tools or ()}


def _functions(tools: Sequence[ResponseTool]) -> list[dict[str, object]]:
    """Return the functions of a chat; a name in a namespace has the namespace's name before it, as its description."""
    functions: list[dict[str, object]] = []
    for place, tool in enumerate(tools):
        if tool.type == "function":
            functions.append(_function(tool))
        for inner in tool.tools or ():
            name = f"{tool.name}.{inner.name}"
            if len(name) > MAX_NAME:
                problem = f"has a function whose name with the namespace's exceeds {MAX_NAME - 1} characters"
                raise invalid(f"'tools.{place}' {problem}.", "tools")
            about = "\n".join(filter(None, [tool.description, inner.description]))
            functions.append(_function(inner, name=name, description=about or None))
    return functions


def _function(tool: FunctionTool, **other: object) -> dict[str, object]:
    function = tool.model_copy(update=other).model_dump(
        include={"name", "description", "parameters", "strict"}, exclude_none=True
    )
    return {"type": "function", "function": function}


def _choice(choice: str | ChosenTool | AllowedChoice | None) -> object:
    if isinstance(choice, AllowedChoice):
        allowed = {"mode": choice.mode, "tools": [_choice(tool) for tool in choice.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return {"type": "function", "function": {"name": choice.name}} if isinstance(choice, ChosenTool) else choice


def _format(wanted: TextFormat) -> dict[str, object]:
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    if wanted.json_schema is None:
        raise invalid("'text.format.schema' is missing.", "text.format")
    return {"type": "json_schema", "json_schema": {"name": wanted.name or "answer", "schema": wanted.json_schema}}
