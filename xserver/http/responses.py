"""Response bodies, as described by /openapi.json; tests validate all responses against them."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length", "tool_calls"]


Json = dict[str, object]


class Returned(BaseModel):
    """Base of all bodies: no further keys."""

    model_config = ConfigDict(extra="forbid")


class Error(Returned):
    """Reason of a failed request."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Returned):
    """An error, in OpenAI's shape."""

    error: Error


class ModelCard(Returned):
    """A model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None = Field(
        description="Maximum tokens of prompt and output together; null: limited by the engine's cache only."
    )


class ModelList(Returned):
    """All served models."""

    object: Literal["list"]
    data: list[ModelCard]


class PromptTokensDetails(Returned):
    """Parts of the prompts' tokens."""

    cached_tokens: int


class TokenUsage(Returned):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TextLogprobs(Returned):
    """Log-probabilities of a completion's tokens, one per list and token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Returned):
    """One continuation of a prompt."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] = Field(default_factory=list, description="With `return_token_ids`.")
    prompt_token_ids: list[int] = Field(default_factory=list, description="With `return_token_ids`.")


class TopLogprob(Returned):
    """A candidate token."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A generated token."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Returned):
    """Log-probabilities of a message's tokens."""

    content: list[TokenLogprob]
    refusal: None


class ReturnedFunction(Returned):
    """The function of a call, and its arguments as JSON."""

    name: str
    arguments: str


class ReturnedToolCall(Returned):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: ReturnedFunction


class ChatMessage(Returned):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ReturnedToolCall] = Field(default_factory=list)
    reasoning_content: str | None = Field(None, description="With --reasoning-parser.")


class ChatChoice(Returned):
    """One answer to a conversation."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] = Field(default_factory=list, description="With `return_token_ids`.")


class FunctionDelta(Returned):
    """The name of a function, or an addition to its arguments."""

    name: str = ""
    arguments: str


class ToolCallDelta(Returned):
    """An addition to a call; the first one has its id and name."""

    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionDelta


class Delta(Returned):
    """An addition to a message: its role with the first token, nothing with the reason."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[ToolCallDelta] = Field(default_factory=list)


class ChatDelta(Returned):
    """An addition to one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] = Field(default_factory=list, description="With `return_token_ids`.")


class Made(Returned):
    """Base of generated completions."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class TextCompletion(Made):
    """The answer of `POST /v1/completions`; streamed, `usage` only on request."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: TokenUsage | None = None


class ChatCompletion(Made):
    """The answer of `POST /v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: TokenUsage
    prompt_token_ids: list[int] = Field(default_factory=list, description="With `return_token_ids`.")


class ChatChunk(Made):
    """An event of a streamed answer."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatDelta]
    usage: TokenUsage | None = None
    prompt_token_ids: list[int] = Field(default_factory=list, description="With `return_token_ids`; first event only.")


class ResponseDocument(Returned):
    """The answer of `POST /v1/responses`."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "in_progress", "failed"]
    background: Literal[False]
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[Json] = Field(description="Items of the types message, function_call and reasoning.")
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, str | None]
    store: Literal[False]
    temperature: float
    text: Json
    tool_choice: str | dict[str, str]
    tools: list[Json]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: Json | None
    user: str | None
    completed_at: int | None
    prompt_cache_key: str | None
    safety_identifier: str | None
    conversation: None
    prompt: None
    prompt_cache_diagnostics: None
    service_tier: None
    moderation: None
    metadata: Json


class ResponseEvent(Returned):
    """An event of a streamed response; its other keys depend on its type."""

    model_config = ConfigDict(extra="allow")
    type: str
    sequence_number: int


class Tokens(Returned):
    """The answer of `POST /tokenize`."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str | None] | None


class DetokenizedText(Returned):
    """The answer of `POST /detokenize`."""

    prompt: str


class TokenizerInfo(Returned):
    """The answer of `GET /tokenizer_info`: what a client needs to tokenize like this model."""

    tokenizer_class: str | None
    add_bos_token: bool | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    model_max_length: int | None = Field(description="Maximum tokens of a request.")
    chat_template: str | None = Field(description="The template that the server uses.")


class Version(Returned):
    """The answer of `GET /version`."""

    version: str


class Accepted(Returned):
    """The answer of `POST /schedule`: the engine takes it over as soon as it can."""

    accepted: Literal[True]


class Draining(Returned):
    """The answer of `POST /drain`."""

    draining: Literal[True]


class PredictedState(Returned):
    """Predictions for a schedule."""

    steady_state: Json | None = Field(description="Throughput and latencies; null until it is computed.")
    batch_size: dict[str, float] = Field(description="Sequences of a micro-batch, by phase.")


class EnforcedSchedule(Returned):
    """The answer of `GET /schedule`."""

    schedule: Json = Field(description="The enforced schedule.")
    goodput_seq_s: float | None = Field(description="Requests/s within the bound, as predicted.")
    assumptions: list[str]
    predicted: PredictedState
    observed: Json = Field(description="Observations of the last minute.")
    replicas: int = Field(description="Number of the model's replicas; `replica=N` selects one, from 0.")


class FollowedPlan(Returned):
    """The answer of `GET /plan`."""

    plan: Json = Field(description="The followed plan.")
    watched_seq_s: dict[str, float] | None = Field(
        description="Rates by model against which drift is measured; null for a fixed plan."
    )
    replans: dict[str, int] = Field(description="Number of replanning searches by outcome.")
    last: str | None = Field(description="Outcome of the last search.")
