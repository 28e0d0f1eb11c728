"""Convert a conversation's messages to the prompt's text."""

from typing import Any

from xserver.http.api_error import invalid
from xserver.http.schemas import Conversation, Message
from xserver.http.served_model import ServedModel


def prompt_of(body: Conversation, model: ServedModel) -> str:
    """Return the prompt's text; ApiError if the model has no chat template, or the template refuses the messages."""
    if model.chat_template is None:
        raise invalid(
            "The model has no chat template: start the server with --chat-template FILE, or use /v1/completions.",
            "messages",
            "chat_template_missing",
        )
    goes_on = bool(body.continue_final_message)
    begins = not goes_on if body.add_generation_prompt is None else body.add_generation_prompt
    if goes_on and begins:
        raise invalid(
            "'continue_final_message' and 'add_generation_prompt' exclude each other: set only one of them.",
            "continue_final_message",
        )
    if goes_on and body.messages[-1].role != "assistant":
        raise invalid("'continue_final_message' needs a final assistant message.", "continue_final_message")
    messages = [_rendered(message) for message in body.messages]
    return model.chat_template.render(messages, begins, goes_on, body.chat_template_kwargs or {}, model.longest_text)


def _rendered(message: Message) -> dict[str, Any]:
    """Return a message for templates: `developer` becomes `system`, and parts become one text."""
    text = message.content if isinstance(message.content, str) else "\n".join(part.text for part in message.content)
    role = "system" if message.role == "developer" else message.role
    named = {"name": message.name, "tool_call_id": message.tool_call_id}
    return {"role": role, "content": text} | {key: value for key, value in named.items() if value is not None}
