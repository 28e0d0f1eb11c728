"""`POST /v1/chat/completions`: answer conversations, as one document or as a stream."""

from collections.abc import Iterable, Sequence
from typing import Any

from xserver.http.answering import ApiAnswer
from xserver.http.api_error import invalid
from xserver.http.frontend import Frontend
from xserver.http.generation import Choice, Piece
from xserver.http.schemas import ChatRequest
from xserver.text.conversation import prompt_of
from xserver.text.text_log_probs import TextLogProb, chat_logprobs


class ChatAnswer(ApiAnswer):
    """One request for an assistant's message."""

    prefix, kind = "chatcmpl-", "chat.completion"
    body: ChatRequest

    def prepare(self, frontend: Frontend) -> None:
        """Tokenize the conversation and make its `n` choices."""
        self.check_stream()
        body, param = self.body, "max_tokens" if self.body.max_completion_tokens is None else "max_completion_tokens"
        most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        if most == 0:
            raise invalid(f"'{param}' is 0: it must be at least 1.", param)
        if body.top_logprobs is not None and not body.logprobs:
            raise invalid("'top_logprobs' needs 'logprobs': set it to true.", "top_logprobs")
        ids = frontend.model.encode(prompt_of(body, frontend.model), special=False, param="messages")
        if not ids:
            raise invalid("The chat template makes an empty prompt of 'messages'.", "messages")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        self.add_choices(frontend, ids, frontend.limited(len(ids), most, param, "messages"), logprobs=logprobs)

    def choice(self, choice: Choice, text: str) -> dict[str, Any]:
        """Return the document of a complete choice."""
        message = {"role": "assistant", "content": text, "refusal": None}
        document = {"index": choice.index, "message": message, "logprobs": self._logprobs(choice.logprobs)}
        return document | {"finish_reason": choice.finish_reason} | self._ids(choice.output.tokens[: choice.taken])

    def deltas(self, piece: Piece, first: bool) -> Iterable[dict[str, Any]]:
        """Yield the text, with the role before the first one; then the end as a separate document."""
        if first or piece.text or piece.logprobs or self.body.return_token_ids:
            role = {"role": "assistant"} if first else {}
            delta = {"index": piece.choice.index, "delta": {**role, "content": piece.text}, "finish_reason": None}
            yield delta | {"logprobs": self._logprobs(piece.logprobs)} | self._ids(piece.tokens)
        if piece.finish_reason:
            yield {"index": piece.choice.index, "delta": {}, "logprobs": None, "finish_reason": piece.finish_reason}

    def document(
        self, choices: list[dict[str, Any]], stream: bool = False, usage: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return a response, or a chunk of a stream; the first has the prompt's ids if the request wants them."""
        document = super().document(choices, stream, usage)
        if self.body.return_token_ids and not self._ids_sent:
            document["prompt_token_ids"] = list(self.choices[0].request.prompt_ids)
            self._ids_sent = True
        return document

    _ids_sent = False

    def _ids(self, tokens: Iterable[int]) -> dict[str, Any]:
        return {"token_ids": list(tokens)} if self.body.return_token_ids else {}

    def _logprobs(self, entries: Sequence[TextLogProb]) -> dict[str, Any] | None:
        return chat_logprobs(entries) if self.body.logprobs else None
