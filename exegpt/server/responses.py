"""What clients get, as /openapi.json describes it: tests hold the answers to these."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length"]


class Returned(BaseModel):
    """Base: no other keys are returned."""

    model_config = ConfigDict(extra="forbid")


class Error(Returned):
    """Why a request can't be answered."""

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
    max_model_len: int = Field(description="Most tokens of prompt and output together.")


class ModelList(Returned):
    """The models that are served."""

    object: Literal["list"]
    data: list[ModelCard]


class Usage(Returned):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


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
    """A token that might have come."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token that has come."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Returned):
    """Log-probabilities of a message's tokens."""

    content: list[TokenLogprob]
    refusal: None


class ChatMessage(Returned):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Returned):
    """One answer to a conversation."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] = Field(default_factory=list, description="With `return_token_ids`.")


class Delta(Returned):
    """What comes to a message: its role with the first token, nothing with the reason."""

    role: Literal["assistant"] = "assistant"
    content: str = ""


class ChatDelta(Returned):
    """What comes to one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] = Field(default_factory=list, description="With `return_token_ids`.")


class Made(Returned):
    """Base of what is generated."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class TextCompletion(Made):
    """The answer of `POST /v1/completions`; streamed, without `usage` unless it is asked for."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage | None = None


class ChatCompletion(Made):
    """The answer of `POST /v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] = Field(default_factory=list, description="With `return_token_ids`.")


class ChatChunk(Made):
    """An event of a streamed answer."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatDelta]
    usage: Usage | None = None
    prompt_token_ids: list[int] = Field(default_factory=list, description="With `return_token_ids`, in the first.")


class Tokens(Returned):
    """The answer of `POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class DetokenizedText(Returned):
    """The answer of `POST /detokenize`."""

    prompt: str


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
    """What a schedule is expected to give."""

    steady_state: dict[str, Any] | None = Field(description="Throughput and latencies; null until it is computed.")
    batch_size: dict[str, float] = Field(description="Sequences of a micro-batch, by phase.")


class EnforcedSchedule(Returned):
    """The answer of `GET /schedule`."""

    schedule: dict[str, Any] = Field(description="What is enforced.")
    goodput_seq_s: float | None = Field(description="Requests/s within the bound, as predicted.")
    assumptions: list[str]
    predicted: PredictedState
    observed: dict[str, Any] = Field(description="What the last minute came to.")


class FollowedPlan(Returned):
    """The answer of `GET /plan`."""

    plan: dict[str, Any] = Field(description="What is followed.")
    watched_seq_s: dict[str, float] | None = Field(
        description="Rates by model, from which popularity may drift; null where the plan stays, whatever comes."
    )
    replans: dict[str, int] = Field(description="Searches for another plan, by what came of them.")
    last: str | None = Field(description="What came of the last one.")
