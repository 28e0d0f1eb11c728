"""Keys of OpenAI's and vLLM's APIs without support: their neutral values ask for nothing, and are accepted."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from xserver.http.api_error import invalid

COMPLETIONS, CHAT, RESPONSES = "completions", "chat", "responses"


@dataclass(frozen=True)
class Unsupported:
    """A key that some endpoints don't support, and its values that request nothing."""

    key: str
    endpoints: tuple[str, ...]
    neutral: tuple[object, ...] = ()


_ALL = (COMPLETIONS, CHAT, RESPONSES)
_SAMPLED = (COMPLETIONS, CHAT)
UNSUPPORTED = (
    Unsupported("best_of", _SAMPLED, (1,)),
    Unsupported("use_beam_search", _SAMPLED),
    Unsupported("length_penalty", _SAMPLED, (1,)),
    Unsupported("suffix", (COMPLETIONS,)),
    Unsupported("skip_special_tokens", _SAMPLED, (True,)),
    Unsupported("spaces_between_special_tokens", _SAMPLED, (True,)),
    Unsupported("add_special_tokens", (COMPLETIONS,), (True,)),
    Unsupported("add_special_tokens", (CHAT,)),
    Unsupported("tools", (COMPLETIONS,)),
    Unsupported("tool_choice", (COMPLETIONS,), ("none", "auto")),
    Unsupported("parallel_tool_calls", (COMPLETIONS,), (True,)),
    Unsupported("functions", (CHAT,)),
    Unsupported("function_call", (CHAT,), ("none",)),
    Unsupported("modalities", (CHAT,), (["text"],)),
    Unsupported("audio", (CHAT,)),
    Unsupported("prediction", (CHAT,)),
    Unsupported("web_search_options", (CHAT,)),
    Unsupported("verbosity", (CHAT,), ("medium",)),
    Unsupported("chat_template", (CHAT,)),
    Unsupported("background", (RESPONSES,)),
    Unsupported("conversation", (RESPONSES,)),
    Unsupported("previous_response_id", (RESPONSES,)),
    Unsupported("prompt", (RESPONSES,)),
    Unsupported("truncation", (RESPONSES,), ("disabled",)),
    Unsupported("moderation", _ALL),
    Unsupported("context_management", (RESPONSES,)),
    Unsupported("access_programs", (RESPONSES,)),
    Unsupported("background_options", (RESPONSES,)),
    Unsupported("image", (RESPONSES,)),
)
"""The keys, in the order in which they are checked; null, false, "", [] and {} are neutral for all of them."""
_WHOLE = "pass the whole conversation in 'input', as clients do that are set to 'store': false"
_REASONS = {
    "background": "This server keeps no responses, so it can't run one in the background.",
    "previous_response_id": f"This server keeps no responses: {_WHOLE}.",
    "conversation": f"This server keeps no conversations: {_WHOLE}.",
}


def is_empty(value: object) -> bool:
    """Return whether a value asks for nothing, for any key: null, false, and empty texts, lists and objects."""
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


def without_neutral_keys(endpoint: str, data: Mapping[str, object]) -> dict[str, object]:
    """Return a body without an endpoint's unsupported keys; ApiError if one has a value that asks for something."""
    dropped = set()
    for entry in UNSUPPORTED:
        if endpoint not in entry.endpoints or entry.key not in data:
            continue
        value = data[entry.key]
        if not is_empty(value) and not any(_same(value, neutral) for neutral in entry.neutral):
            raise invalid(_REASONS.get(entry.key, _why(entry)), entry.key, "unsupported_parameter")
        dropped.add(entry.key)
    return {key: value for key, value in data.items() if key not in dropped}


def _why(entry: Unsupported) -> str:
    """Return the reason for refusing a key, with the values that are accepted."""
    accepted = "".join(f" or send {json.dumps(value)}" for value in entry.neutral)
    return f"'{entry.key}' is not supported by this server: leave it out{accepted}."


def _same(value: object, neutral: object) -> bool:
    """Return whether two values are equal; true is no number."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
