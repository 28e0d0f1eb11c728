"""`POST /v1/responses`: answer conversations in OpenAI's newer form, without keeping them."""

import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from xserver.http.api_error import ApiError
from xserver.http.chat import ChatAnswer
from xserver.http.frontend import Frontend
from xserver.http.generation import Choice
from xserver.http.responses_schemas import ResponsesRequest, ResponseTool, chat_of, namespaces
from xserver.http.schemas import Document
from xserver.http.tools import call_id
from xserver.text.message_parts import MessagePart, Thought
from xserver.text.text_log_probs import content_logprobs
from xserver.text.tool_calls import CallDelta

Item = dict[str, Any]
_ABSENT = dict.fromkeys(("conversation", "prompt", "prompt_cache_diagnostics", "service_tier", "moderation"))
"""Keys that clients read, of what this server doesn't have."""
_PARAMS = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text.format"}
"""The names of a chat's keys in the bodies of responses."""
_SERVER = 500
"""The least status of an error that isn't the request's fault."""


class ResponsesAnswer(ChatAnswer):
    """One request for a response."""

    prefix, kind = "resp_", "response"

    def __init__(self, body: ResponsesRequest, frontend: Frontend, answer_id: str, created: int | None = None):
        super().__init__(chat_of(body), frontend, answer_id, created)
        self.asked, self.namespaces = body, namespaces(body)
        self._number = 0
        """The number of the stream's next event."""
        self._items: list[Item] = []
        """The items of a streamed response so far."""
        self._encode = frontend.model.encode

    def prepare(self, frontend: Frontend) -> None:
        """Tokenize the conversation; an ApiError names the body's keys."""
        with _own_params():
            super().prepare(frontend)

    def whole(self, texts: dict[int, str]) -> dict[str, object]:
        """Return the complete response."""
        (choice,) = self.choices
        parser = self.rules.parser()
        output = ResponseOutput(self, choice)
        for part in [*parser.push(texts[choice.index]), *parser.finish()]:
            list(output.add(part))
        list(output.end())
        return self._response(output.items, choice.finish_reason)

    async def chunks(self) -> AsyncIterator[dict[str, object]]:
        """Yield the stream's events, numbered."""
        async for event in self._events():
            yield self._numbered(event)

    async def _events(self) -> AsyncIterator[dict[str, object]]:
        (choice,) = self.choices
        output, parser = ResponseOutput(self, choice), self.rules.parser()
        self._items = output.items
        begun, logprobs = self._response([], None), list[object]()
        yield {"type": "response.created", "response": begun}
        yield {"type": "response.in_progress", "response": begun}
        async for piece in self.generation.pieces():
            logprobs += content_logprobs(piece.logprobs) if self.body.logprobs else ()
            for part in [*parser.push(piece.text), *(parser.finish() if piece.finish_reason else ())]:
                for event in output.add(part, logprobs):
                    yield event
                logprobs = [] if isinstance(part, str) else logprobs
        for event in output.end():
            yield event
        ended = self._response(output.items, choice.finish_reason)
        yield {"type": f"response.{ended['status']}", "response": ended}

    def event(self, document: dict[str, object]) -> bytes:
        """Return an event of the stream, with its type."""
        data = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
        return f"event: {document['type']}\ndata: {data}\n\n".encode()

    def failure(self, error: ApiError) -> bytes:
        """Return the events of an error, and of the failed response: some clients read only the latter."""
        detail: Item = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        reason = {"code": "server_error" if error.status >= _SERVER else "invalid_prompt", "message": error.message}
        failed = self._response(self._items, None) | {"status": "failed", "error": reason}
        events: tuple[Item, Item] = detail, {"type": "response.failed", "response": failed}
        return b"".join(self.event(self._numbered(event)) for event in events)

    last_event = b""

    def _numbered(self, event: dict[str, object]) -> dict[str, object]:
        self._number += 1
        return event | {"sequence_number": self._number - 1}

    def _response(self, items: list[Item], reason: str | None) -> dict[str, object]:
        """Return the response so far; `reason` None: it is in progress."""
        asked = self.asked
        status = {None: "in_progress", "length": "incomplete"}.get(reason, "completed")
        shape = asked.text.format if asked.text and asked.text.format else None
        thinking, choice = asked.reasoning, asked.tool_choice
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": asked.max_tool_calls,
            "model": self._model,
            "output": items,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": thinking.effort if thinking else None, "summary": None},
            "store": False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {"format": shape.model_dump(by_alias=True, exclude_none=True) if shape else {"type": "text"}},
            "tool_choice": choice.model_dump() if isinstance(choice, Document) else choice or "auto",
            "tools": [_echoed(tool) for tool in asked.tools or ()],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": None if reason is None else self._usage(items),
            "user": asked.user,
            "completed_at": int(time.time()) if reason else None,
            "prompt_cache_key": asked.prompt_cache_key,
            "safety_identifier": asked.safety_identifier,
            **_ABSENT,
            "metadata": asked.metadata or {},
        }

    def _usage(self, items: list[Item]) -> dict[str, object]:
        """Return the numbers of tokens; reasoning tokens are counted by tokenizing its text again."""
        thoughts = "".join(part["text"] for item in items if item["type"] == "reasoning" for part in item["content"])
        generated = self.choices[0].taken
        thought = min(generated, len(self._encode(thoughts, special=False))) if thoughts else 0
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": self.prompt_tokens + generated,
        }


def _echoed(tool: ResponseTool) -> dict[str, object]:
    """Return a tool of the request as the response repeats it."""
    return ({"strict": False} if tool.type == "function" else {}) | tool.model_dump(exclude_none=True)


@contextmanager
def _own_params() -> Iterator[None]:
    """Translate key names in errors from those of the chat to those of the original body."""
    try:
        yield
    except ApiError as error:
        if param := _PARAMS.get(error.param or ""):
            error.message, error.param = error.message.replace(f"'{error.param}'", f"'{param}'"), param
        raise


class ResponseOutput:
    """The items of a response as they grow, and the events that report them."""

    def __init__(self, answer: ResponsesAnswer, choice: Choice):
        self.items: list[Item] = []
        self._answer, self._choice = answer, choice
        self._open: Item | None = None
        self._calls = 0

    def add(self, part: MessagePart, logprobs: Sequence[object] = ()) -> Iterator[dict[str, object]]:
        """Add a part of the message; yield its events, those of a text with its log-probabilities."""
        if isinstance(part, CallDelta):
            if part.name is not None:
                yield from self.end()
                yield from self._begin(self._call(part))
            assert self._open
            if part.arguments:
                self._open["arguments"] += part.arguments
                yield self._event("response.function_call_arguments.delta", delta=part.arguments)
            return
        kind, text = ("reasoning", part.text) if isinstance(part, Thought) else ("message", part)
        if self._open is None or self._open["type"] != kind:
            yield from self.end()
            yield from self._begin(self._reasoning() if kind == "reasoning" else self._message())
            yield from self._part_event("added")
        assert self._open
        self._open["content"][0]["text"] += text
        yield self._text_event("delta", logprobs, delta=text)

    def end(self) -> Iterator[dict[str, object]]:
        """End the item that is open; yield its events."""
        item = self._open
        if item is None:
            return
        if item["type"] == "function_call":
            arguments, name = item["arguments"], item["name"]
            yield self._event("response.function_call_arguments.done", arguments=arguments, name=name)
        else:
            content = item["content"][0]
            if item["type"] == "message" and self._choice.logprobs:
                content["logprobs"] = content_logprobs(self._choice.logprobs)
            yield self._text_event("done", content.get("logprobs", ()), text=content["text"])
            yield from self._part_event("done")
        cut = self._choice.finish_reason == "length"
        item["status"] = "incomplete" if cut else "completed"
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}
        self._open = None

    def _begin(self, item: Item) -> Iterator[dict[str, object]]:
        self.items.append(item)
        self._open = item
        shown = item | ({"content": []} if "content" in item else {})
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": shown}

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._answer.id.removeprefix('resp_')}_{len(self.items)}"

    def _message(self) -> Item:
        text = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        state = {"status": "in_progress", "role": "assistant"}
        return {"id": self._id("msg"), "type": "message", **state, "content": [text]}

    def _reasoning(self) -> Item:
        text = {"type": "reasoning_text", "text": ""}
        return {"id": self._id("rs"), "type": "reasoning", "status": "in_progress", "summary": [], "content": [text]}

    def _call(self, part: CallDelta) -> Item:
        identity = call_id(self._answer.id, 0, part.index, self._answer.rules.tool_format)
        space, name = self._answer.namespaces.get(part.name or "", (None, part.name))
        call = {"call_id": identity, "name": name, "arguments": ""} | ({"namespace": space} if space else {})
        return {"id": self._id("fc"), "type": "function_call", "status": "in_progress", **call}

    def _event(self, event_type: str, /, **values: object) -> dict[str, object]:
        assert self._open
        return {"type": event_type, "item_id": self._open["id"], "output_index": len(self.items) - 1, **values}

    def _text_event(self, state: str, logprobs: Sequence[object], **values: object) -> dict[str, object]:
        assert self._open
        if self._open["type"] == "reasoning":
            return self._event(f"response.reasoning_text.{state}", content_index=0, **values)
        return self._event(f"response.output_text.{state}", content_index=0, logprobs=list(logprobs), **values)

    def _part_event(self, state: str) -> Iterator[dict[str, object]]:
        assert self._open
        part = dict(self._open["content"][0])
        yield self._event(f"response.content_part.{state}", content_index=0, part=part)
