"""Request bodies of completions, chat completions and tokenization; `null` is the same as absent."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, RootModel, ValidationError, model_validator
from pydantic_core import ErrorDetails

from xcore.specs.cluster_plan import Plan
from xcore.specs.schedule import Schedule
from xserver.http.api_error import ApiError, invalid
from xserver.http.unsupported import CHAT, COMPLETIONS, is_empty, without_neutral_keys

MAX_MESSAGES, MAX_CALLS = 4096, 128
"""Maximum number of a conversation's messages, and of a message's tool calls."""
MAX_TOOLS, MAX_NAME, MAX_CALLED = 128, 64, 256
"""Maximum number of a conversation's tools, and length of the name of a tool and of a called one, in characters."""
_INT64 = 2**63
_NAMED = {
    "extra_forbidden": "is not known to this server: leave it out",
    "missing": "is missing",
    "string_unicode": "is not valid Unicode",
}


_TYPES = {
    "string_type": "a text",
    "list_type": "a list",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
"""The names of types, where a key takes several."""


def _whole(value: object) -> object:
    """Convert JSON's 1.0 to the integer 1."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
Token = Annotated[Whole, Field(ge=0, lt=2**31)]
Seed = Annotated[Whole | None, Field(ge=-_INT64, lt=_INT64)]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]


Salt = Annotated[
    str | None,
    Field(min_length=1, max_length=1024, description="Only requests with the same salt share cached prefixes."),
]


class Document(BaseModel):
    """Base of all bodies: values of the documented types, and no unknown keys with a meaning."""

    model_config = ConfigDict(extra="forbid", strict=True)
    endpoint: ClassVar[str] = ""
    """The endpoint, for the table of unsupported keys."""

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, data: object) -> object:
        """Drop nulls, and unknown keys with empty values: clients return messages as other servers sent them."""
        if not isinstance(data, dict):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {
            key: value for key, value in data.items() if not (is_empty(value) and (value is None or key not in known))
        }


DocumentT = TypeVar("DocumentT", bound=Document)


class StreamOptions(Document):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = Field(None, description="Has no effect.")


class JsonSchema(Document):
    """A named JSON schema."""

    name: str
    description: str | None = None
    json_schema: dict[str, object] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Document):
    """Constraint on the output: any text, a JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Document):
    """vLLM's constraints on the output, one of them."""

    json_schema: dict[str, object] | str | None = Field(None, alias="json")
    regex: str | None = Field(None, max_length=65536)
    choice: Annotated[list[str], Field(min_length=1, max_length=4096)] | None = None
    grammar: str | None = Field(None, max_length=65536)
    json_object: bool | None = None


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
    seed: Seed = None
    n: Whole | None = Field(None, ge=1, le=128)
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: Whole | None = Field(None, ge=0, lt=2**31)
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, object] | str | None = None
    guided_regex: str | None = Field(None, max_length=65536)
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=4096)] | None = None
    guided_grammar: str | None = Field(None, max_length=65536)
    return_token_ids: bool | None = None
    cache_salt: Salt = None
    priority: Whole | None = Field(None, description="Has no effect.")
    user: str | None = Field(None, description="Has no effect.")
    metadata: dict[str, object] | None = Field(
        None, description="Its texts application, run, unit and deadline_s place a request in an application's run."
    )
    store: bool | None = Field(None, description="Has no effect.")
    service_tier: str | None = Field(None, description="Has no effect.")
    safety_identifier: str | None = Field(None, description="Has no effect.")
    prompt_cache_key: str | None = Field(None, description="Has no effect.")
    prompt_cache_retention: str | None = Field(None, description="Has no effect.")
    prompt_cache_options: dict[str, object] | None = Field(None, description="Has no effect.")


class CompletionRequest(Sampled):
    """The body of `POST /v1/completions`."""

    endpoint = COMPLETIONS
    prompt: str | list[str] | list[Token] | list[list[Token]]
    logprobs: Whole | None = Field(None, ge=0, le=20)
    echo: bool | None = None


class TextPart(Document):
    """A part of a message."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, object] | None = Field(None, description="Has no effect.")


class CalledFunction(Document):
    """The function of a call, and its arguments as JSON."""

    name: str = Field(min_length=1, max_length=MAX_CALLED)
    arguments: str = ""


class ToolCall(Document):
    """A call that an assistant's message has made."""

    id: str | None = Field(None, max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Whole | None = Field(None, description="Has no effect.")


class Message(Document):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: str | None = Field(None, description="Has no effect.")
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS)] | None = None
    tool_call_id: str | None = Field(None, max_length=256)
    reasoning_content: str | None = None
    annotations: list[object] | None = Field(None, description="Has no effect.")
    cache_control: dict[str, object] | None = Field(None, description="Has no effect.")

    @model_validator(mode="after")
    def _check(self) -> "Message":
        """Check that only the assistant calls tools, and that each other message has a content."""
        if self.tool_calls and self.role != "assistant":
            raise ValueError("has tool calls, which only the assistant makes")
        if self.content is None and not self.tool_calls:
            raise ValueError("has no content")
        return self


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


class Conversation(Document):
    """Messages, and how a prompt is rendered from them."""

    messages: Messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    reasoning_effort: str | None = Field(None, max_length=64, description="A variable of the chat template.")


class FunctionTool(Document):
    """A function that the model may call."""

    name: str = Field(pattern=rf"^[a-zA-Z0-9_.-]{{1,{MAX_NAME}}}$")
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class ToolSpec(Document):
    """A tool of a chat."""

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Document):
    """The name of a function."""

    name: str


class NamedTool(Document):
    """The choice of one function."""

    type: Literal["function"]
    function: NamedFunction


class AllowedFunctions(Document):
    """Some of the functions, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Document):
    """The choice of some functions; the prompt shows the others too."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


class ChatRequest(Sampled, Conversation):
    """The body of `POST /v1/chat/completions`."""

    endpoint = CHAT
    tools: Annotated[list[ToolSpec], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: (
        Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedTools, Field(discriminator="type")] | None
    ) = None
    parallel_tool_calls: bool | None = None
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


def parsed(kind: type[DocumentT], data: dict[str, object]) -> DocumentT:
    """Return a body as a `kind`; ApiError names the first wrong key, and never repeats its value."""
    if kind.endpoint:
        data = without_neutral_keys(kind.endpoint, data)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _problem(error.errors(include_input=False, include_url=False, include_context=False), data) from None


def _problem(details: Sequence[ErrorDetails], data: dict[str, object]) -> ApiError:
    """Return the error of a body: the error of the wrong element, also if a key takes several types."""
    first = details[0]["loc"][:1]
    mine = [detail for detail in details if detail["loc"][:1] == first]
    if unsupported := _unsupported_type(mine, data):
        return unsupported
    places = [(_place(detail["loc"], detail["type"] == "missing", data), detail) for detail in mine]
    place = max((place for place, _ in places), key=lambda place: (len(place), [str(part).zfill(9) for part in place]))
    there = [detail for other, detail in places if other == place]
    kinds = [detail["type"] for detail in there]
    if all(kind in _TYPES for kind in kinds):
        why = f"must be {' or '.join(dict.fromkeys(_TYPES[kind] for kind in kinds))}"
    else:
        why = _NAMED.get(kinds[0], _message(there[0]))
    code = "unsupported_parameter" if "extra_forbidden" in kinds else "invalid_value"
    return invalid(f"'{_dotted(place)}' {why}.", str(first[0])[:128] if first else None, code)


def _unsupported_type(details: Sequence[ErrorDetails], data: dict[str, object]) -> ApiError | None:
    """Return the error of an object whose `type` is not supported; its other errors follow from that."""
    for detail in details:
        if detail["type"] == "literal_error" and len(detail["loc"]) > 1 and detail["loc"][-1] == "type":
            where = _dotted(_place(detail["loc"], False, data))
            why = f"'{where}' {_message(detail)}: this server supports no other type."
            return invalid(why, str(detail["loc"][0])[:128])
        if detail["type"] == "union_tag_invalid":
            known = detail["msg"].partition("expected tags: ")[2].replace(", ", " or ")
            where = _dotted((*_place(detail["loc"], False, data), "type"))
            return invalid(f"'{where}' should be {known}: this server supports no other type.", str(detail["loc"][0]))
        if detail["type"] == "union_tag_not_found":
            return invalid(f"'{_dotted((*_place(detail['loc'], False, data), 'type'))}' is missing.")
    return None


def _message(detail: ErrorDetails) -> str:
    """Return pydantic's message, without its beginning and its full stop."""
    return detail["msg"].removeprefix("Input ").removeprefix("Value error, ").rstrip(".")


def _dotted(place: Sequence[int | str]) -> str:
    """Return a place as text; it may have keys of the client's."""
    return ".".join(map(str, place))[:128]


def _place(loc: Sequence[int | str], missing: bool, data: object) -> tuple[int | str, ...]:
    """Return the keys and indices of an error's place, without the names of types that pydantic puts between them.

    With `missing`, the last one is a key that isn't there.
    """
    place: list[int | str] = []
    for i, part in enumerate(loc):
        if isinstance(data, dict):
            inside, within = part in data, data.get(part)
        elif isinstance(data, list) and isinstance(part, int):
            inside, within = True, data[part]
        else:
            inside, within = False, None
        if inside or i == 0:
            place.append(part)
            data = within
        elif missing and i == len(loc) - 1:
            place.append(part)
    return tuple(place)
