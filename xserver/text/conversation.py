"""Convert a conversation's messages and tools to the prompt's text."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from xserver.http.api_error import invalid
from xserver.http.schemas import Conversation, Message
from xserver.http.served_model import ServedModel
from xserver.text.tool_grammar import Tool

_TOOLS_TEXT = (
    "You can call functions. To call one, answer only with a line of JSON for each call: "
    '{"name": FUNCTION, "arguments": OBJECT}. The functions are:\n'
)


def prompt_of(body: Conversation, model: ServedModel, tools: Sequence[Tool] = ()) -> str:
    """Return the prompt's text; ApiError if the model has no chat template, or the template refuses the messages."""
    if model.chat_template is None:
        raise invalid(
            "The model has no chat template: start the server with --chat-template FILE, or use /v1/completions.",
            "messages",
            "chat_template_missing",
        )
    continues = bool(body.continue_final_message)
    begins = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    if continues and begins:
        raise invalid(
            "'continue_final_message' and 'add_generation_prompt' exclude each other: set only one of them.",
            "continue_final_message",
        )
    if continues and body.messages[-1].role != "assistant":
        raise invalid("'continue_final_message' needs a final assistant message.", "continue_final_message")
    messages = [_rendered(message) for message in body.messages]
    options, documents = dict(body.chat_template_kwargs or {}), [tool.document for tool in tools] or None
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
    if not model.chat_template.takes_tools:
        messages, documents = list(_without_tools(messages, documents or ())), None
    return model.chat_template.render(messages, begins, continues, options, model.longest_text, documents)


def _rendered(message: Message) -> dict[str, object]:
    """Return a message for templates: `developer` becomes `system`, parts become one text, arguments an object."""
    parts = message.content or ""
    text = parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
        }
        for call in message.tool_calls or ()
    ]
    named = {
        "name": message.name,
        "tool_calls": calls or None,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content,
    }
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": text} | {key: value for key, value in named.items() if value is not None}


def _arguments(text: str) -> object:
    """Return a call's arguments as templates expect them: an object, or the text if it isn't an object."""
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text


def _without_tools(
    messages: Iterable[dict[str, Any]], tools: Sequence[dict[str, object]]
) -> Iterable[dict[str, object]]:
    """Yield a conversation for a template without tools: tools, calls and results become texts of other messages."""
    described = _TOOLS_TEXT + "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    results: list[str] = []
    for place, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if place == 0 and tools:
            if role == "system":
                content = f"{content}\n\n{described}"
            else:
                yield {"role": "system", "content": described}
        if role == "tool":
            results.append(f"Result of the call {message.get('tool_call_id', '')}: {content}")
            continue
        if results:
            content = "\n".join([*results, content] if role == "user" else results)
            results = []
            if role != "user":
                yield {"role": "user", "content": content}
                content = message["content"]
        calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
        content = "\n".join([content, *calls] if content else calls) if calls else content
        kept = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
        yield kept | {"content": content}
    if results:
        yield {"role": "user", "content": "\n".join(results)}
