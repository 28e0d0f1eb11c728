"""Write docs/keys.md: every key of OpenAI's requests, and what the server makes of it, from the server's own tables.

python docs/keys.py
"""

import json
from pathlib import Path

from xserver.http.responses_schemas import ResponsesRequest
from xserver.http.schemas import ChatRequest, CompletionRequest, Document
from xserver.http.unsupported import UNSUPPORTED

OPENAI: dict[str, str] = {
    "completions": """
        best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt seed
        stop stream stream_options suffix temperature top_p user
    """,
    "chat": """
        audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens
        messages metadata modalities model moderation n parallel_tool_calls prediction presence_penalty
        prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort response_format
        safety_identifier seed service_tier stop store stream stream_options temperature tool_choice tools
        top_logprobs top_p user verbosity web_search_options
    """,
    "responses": """
        access_programs background background_options context_management conversation image include input
        instructions max_output_tokens max_tool_calls metadata model moderation parallel_tool_calls
        previous_response_id prompt prompt_cache_key prompt_cache_options prompt_cache_retention reasoning
        safety_identifier service_tier store stream stream_options temperature text tool_choice tools
        top_logprobs top_p truncation user
    """,
}
"""The keys of each endpoint's body in openai-python 3.54."""
PATHS: dict[str, tuple[str, type[Document]]] = {
    "completions": ("POST /v1/completions", CompletionRequest),
    "chat": ("POST /v1/chat/completions", ChatRequest),
    "responses": ("POST /v1/responses", ResponsesRequest),
}


def meaning(endpoint: str, key: str) -> str:
    """Return what the server makes of a key; KeyError for a key of which no table says anything."""
    for entry in UNSUPPORTED:
        if entry.key == key and endpoint in entry.endpoints:
            neutral = ", ".join(f"`{json.dumps(value)}`" for value in entry.neutral)
            accepted = f" unless it is {neutral} or empty" if neutral else " unless it is empty"
            return f"400 `unsupported_parameter`{accepted}"
    field = PATHS[endpoint][1].model_fields[key]
    return "accepted, without effect" if field.description == "Has no effect." else "supported"


def page() -> str:
    """Return the page as Markdown."""
    lines = ["# Keys of requests", "", "Written by `python docs/keys.py` from the tables that the server uses.", ""]
    lines += [
        "Empty values are null, false, and empty texts, lists and objects. They are accepted for every key, also for",
        "unknown ones. An unknown key with another value is refused with 400 `unsupported_parameter`.",
        "",
    ]
    for endpoint, (path, kind) in PATHS.items():
        known = OPENAI[endpoint].split()
        lines += [f"## {path}", "", "| key of OpenAI's API | |", "|---|---|"]
        lines += [f"| `{key}` | {meaning(endpoint, key)} |" for key in sorted(known)]
        more = sorted({field.alias or name for name, field in kind.model_fields.items()} - set(known))
        lines += (
            ["", "Also supported, as in vLLM: " + ", ".join(f"`{key}`" for key in more) + ".", ""] if more else [""]
        )
    return "\n".join(lines)


if __name__ == "__main__":
    (Path(__file__).parent / "keys.md").write_text(page(), encoding="utf-8")
