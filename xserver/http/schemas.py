"""Request bodies of completions, chat completions and tokenization; `null` is the same as absent."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, RootModel, ValidationError, model_validator

from xcore.specs.cluster_plan import Plan
from xcore.specs.schedule import Schedule
from xserver.http.api_error import ApiError, invalid

UNSUPPORTED = (
    "tools tool_choice functions function_call audio modalities prediction suffix best_of use_beam_search"
    " length_penalty parallel_tool_calls web_search_options reasoning_effort verbosity chat_template"
).split()
"""Keys of OpenAI's or vLLM's API that this server doesn't support."""
_INT64 = 2**63
_NAMED = {
    "extra_forbidden": "is not known to this server",
    "missing": "is missing",
    "string_unicode": "is not valid Unicode",
}


def _whole(value: Any) -> Any:
    """Convert JSON's 1.0 to the integer 1."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
Token = Annotated[Whole, Field(ge=0, lt=2**31)]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]


class Document(BaseModel):
    """Base of all bodies: values of the documented types, no unknown keys."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Document):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = Field(None, description="Has no effect.")


class JsonSchema(Document):
    """A named JSON schema."""

    name: str
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Document):
    """Constraint on the output: any text, a JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Sampled(Document):
    """Keys common to completions and chat completions."""

    model: str | None = Field(None, max_length=1024)
    max_tokens: Whole | None = Field(None, ge=0, lt=2**31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: Whole | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=1e-4, le=10)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=1024)
    seed: Whole | None = Field(None, ge=-_INT64, lt=_INT64)
    n: Whole | None = Field(None, ge=1, le=128)
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: Whole | None = Field(None, ge=0, lt=2**31)
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None
    priority: Whole | None = Field(None, description="Has no effect.")
    user: str | None = Field(None, description="Has no effect.")
    metadata: dict[str, Any] | None = Field(None, description="Has no effect.")
    store: bool | None = Field(None, description="Has no effect.")
    service_tier: str | None = Field(None, description="Has no effect.")
    safety_identifier: str | None = Field(None, description="Has no effect.")
    prompt_cache_key: str | None = Field(None, description="Has no effect.")


class CompletionRequest(Sampled):
    """The body of `POST /v1/completions`."""

    prompt: str | list[str] | list[Token] | list[list[Token]]
    logprobs: Whole | None = Field(None, ge=0, le=20)
    echo: bool | None = None


class TextPart(Document):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Document):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None
    refusal: str | None = Field(None, description="Has no effect.")
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, data: Any) -> Any:
        """Drop nulls: clients return messages as received, with null for unsupported keys."""
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


Messages = Annotated[list[Message], Field(min_length=1, max_length=4096)]


class Conversation(Document):
    """Messages, and how a prompt is rendered from them."""

    messages: Messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(Sampled, Conversation):
    """The body of `POST /v1/chat/completions`."""

    max_completion_tokens: Whole | None = Field(None, ge=0, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: Whole | None = Field(None, ge=0, le=20)


class TokenizePrompt(Document):
    """The body of `POST /tokenize` for a text."""

    model: str | None = Field(None, max_length=1024)
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChat(Conversation):
    """The body of `POST /tokenize` for a conversation."""

    model: str | None = Field(None, max_length=1024)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Document):
    """The body of `POST /detokenize`."""

    model: str | None = Field(None, max_length=1024)
    tokens: list[Token]


class ScheduleToFollow(RootModel[Schedule]):
    """The body of `POST /schedule`: a file written by `exegpt tune`. Only for /openapi.json; read like a file."""


class PlanToFollow(RootModel[Plan]):
    """The body of `POST /plan`: a file written by `exegpt plan`. Only for /openapi.json; read like a file."""


def parsed(kind: type[Document], data: dict[str, Any]) -> Any:
    """Return a body as a `kind`; ApiError names the first wrong key, and never repeats its value."""
    unsupported = next((key for key in UNSUPPORTED if data.get(key) is not None), None)
    if unsupported and not (unsupported == "tool_choice" and data[unsupported] == "none"):
        raise invalid(f"'{unsupported}' is not supported by this server.", unsupported, "unsupported_parameter")
    try:
        return kind.model_validate({key: value for key, value in data.items() if key not in UNSUPPORTED})
    except ValidationError as error:
        raise _problem(error) from None


def _problem(error: ValidationError) -> ApiError:
    detail = error.errors(include_input=False, include_url=False, include_context=False)[0]
    key, kind = detail["loc"][0] if detail["loc"] else "", detail["type"]
    param = str(key)[:128]
    where = ".".join(map(str, detail["loc"][:3]))[:128] if key == "messages" else param
    text = detail["msg"].removeprefix("Input ").rstrip(".")
    known = kind not in ("extra_forbidden",)
    why = _NAMED.get(kind, text)
    return invalid(f"'{where}' {why}.", param or None, "invalid_value" if known else "unsupported_parameter")
