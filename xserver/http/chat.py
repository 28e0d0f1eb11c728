"""`POST /v1/chat/completions`: answer conversations, as one document or as a stream."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from xserver.admission.token_bounds import TokenBounds
from xserver.http.answering import ApiAnswer
from xserver.http.api_error import invalid
from xserver.http.frontend import Frontend
from xserver.http.generation import Choice, Piece
from xserver.http.output_format import output_format
from xserver.http.sampling_params import Wanted
from xserver.http.schemas import ChatRequest, Message
from xserver.http.tools import OutputRules, call_document, call_id, merged_deltas, output_rules, whole_calls
from xserver.text.conversation import prompt_of
from xserver.text.message_parts import MessageParser, MessagePart, Thought
from xserver.text.text_log_probs import TextLogProb, chat_logprobs
from xserver.text.tool_calls import CallDelta


class ChatAnswer(ApiAnswer):
    """One request for an assistant's message."""

    prefix, kind = "chatcmpl-", "chat.completion"
    body: ChatRequest
    rules: OutputRules
    """How its outputs are constrained, and split into messages."""

    def bounds(self, frontend: Frontend) -> TokenBounds:
        """Return the bounds that follow from the messages; the chat template may add any number of tokens."""
        body = self.body
        parts = [message.content or "" for message in body.messages]
        texts = [each if isinstance(each, str) else "".join(part.text for part in each) for each in parts]
        most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        characters = sum(map(len, texts))
        others = sum(map(_other_characters, body.messages))
        return TokenBounds(body.n or 1, characters + others, characters // frontend.model.longest_token, None, most)

    def prepare(self, frontend: Frontend) -> None:
        """Tokenize the conversation and make its `n` choices."""
        self.check_stream()
        body, param = self.body, "max_tokens" if self.body.max_completion_tokens is None else "max_completion_tokens"
        most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        if most == 0:
            raise invalid(f"'{param}' is 0: it must be at least 1.", param)
        if body.top_logprobs and not body.logprobs:
            raise invalid("'top_logprobs' needs 'logprobs': set it to true.", "top_logprobs")
        model, self.rules = frontend.model, output_rules(body, frontend.model)
        prompt = prompt_of(body, model, self.rules.tools)
        ids = model.encode(prompt, special=False, param="messages")
        if not ids:
            raise invalid("The chat template makes an empty prompt of 'messages'.", "messages")
        if self.rules.reasoning:
            self.rules = replace(self.rules, begun=self.rules.reasoning.begun_in(prompt))
        answer = output_format(body, model)
        grammar = self.rules.grammar(answer, model, prompt)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        marks = frozenset(token for mark in self.rules.marks if (token := model.special_token(mark)) is not None)
        wanted = Wanted(grammar, answer.param if answer else "tools", logprobs, named=marks)
        self.add_choices(frontend, ids, frontend.limited(len(ids), most, param, "messages"), wanted)
        self._parsers = {choice.index: self.rules.parser() for choice in self.choices}

    def choice(self, choice: Choice, text: str) -> dict[str, object]:
        """Return the document of a complete choice."""
        parser = self.rules.parser()
        parts = [*parser.push(text), *parser.finish()]
        message = {"role": "assistant", **self._message(choice, parts), "refusal": None}
        document = {"index": choice.index, "message": message, "logprobs": self._logprobs(choice.logprobs)}
        reason = _reason(choice.finish_reason, parser)
        return document | {"finish_reason": reason} | self._ids(choice.output.tokens[: choice.taken])

    def _message(self, choice: Choice, parts: Sequence[MessagePart]) -> dict[str, object]:
        """Return the content, the calls and the reasoning of a complete message."""
        content = "".join(part for part in parts if isinstance(part, str))
        message: dict[str, object] = {"content": content}
        calls = whole_calls([part for part in parts if isinstance(part, CallDelta)])
        if calls:
            message["content"] = content or None
            message["tool_calls"] = [
                call_document(self._call_id(choice, place), *call) for place, call in enumerate(calls)
            ]
        if self.rules.reasoning:
            message["reasoning_content"] = "".join(part.text for part in parts if isinstance(part, Thought)) or None
        return message

    def deltas(self, piece: Piece, first: bool) -> Iterable[dict[str, object]]:
        """Yield the new parts, with the role before the first ones; then the end as a separate document."""
        parser = self._parsers[piece.choice.index]
        parts = [*parser.push(piece.text), *(parser.finish() if piece.finish_reason else ())]
        if first or parts or piece.logprobs or self.body.return_token_ids:
            role = {"role": "assistant"} if first else {}
            calls = merged_deltas([part for part in parts if isinstance(part, CallDelta)])
            new = {**role, **self._delta(piece.choice, parts, calls[:1])}
            delta = {"index": piece.choice.index, "delta": new, "finish_reason": None}
            yield delta | {"logprobs": self._logprobs(piece.logprobs)} | self._ids(piece.tokens)
            for call in calls[1:]:  # one call in a chunk: some clients read only the first
                new = self._delta(piece.choice, (), [call])
                yield {"index": piece.choice.index, "delta": new, "finish_reason": None, "logprobs": None}
        if piece.finish_reason:
            end = {"index": piece.choice.index, "delta": {}, "logprobs": None}
            yield end | {"finish_reason": _reason(piece.finish_reason, parser)}

    def _delta(self, choice: Choice, parts: Sequence[MessagePart], deltas: Sequence[CallDelta]) -> dict[str, object]:
        """Return the additions to a message: the texts of parts, and the deltas of its calls."""
        content = "".join(part for part in parts if isinstance(part, str))
        thought = "".join(part.text for part in parts if isinstance(part, Thought))
        calls = [self._call_delta(choice, delta) for delta in deltas]
        delta: dict[str, object] = {"content": content} if content or not (thought or calls) else {}
        if thought:
            delta["reasoning_content"] = thought
        return delta | ({"tool_calls": calls} if calls else {})

    def _call_delta(self, choice: Choice, part: CallDelta) -> dict[str, object]:
        if part.name is None:
            return {"index": part.index, "function": {"arguments": part.arguments}}
        return {"index": part.index} | call_document(self._call_id(choice, part.index), part.name, part.arguments)

    def _call_id(self, choice: Choice, call: int) -> str:
        return call_id(self.id, choice.index, call, self.rules.tool_format)

    def document(
        self, choices: list[dict[str, object]], stream: bool = False, usage: dict[str, object] | None = None
    ) -> dict[str, object]:
        """Return a response, or a chunk of a stream; the first has the prompt's ids if the request wants them."""
        document = super().document(choices, stream, usage)
        if self.body.return_token_ids and not self._ids_sent:
            document["prompt_token_ids"] = list(self.choices[0].request.prompt_ids)
            self._ids_sent = True
        return document

    _ids_sent = False

    def _ids(self, tokens: Iterable[int]) -> dict[str, object]:
        return {"token_ids": list(tokens)} if self.body.return_token_ids else {}

    def _logprobs(self, entries: Sequence[TextLogProb]) -> dict[str, object] | None:
        return chat_logprobs(entries) if self.body.logprobs else None


def _other_characters(message: Message) -> int:
    """Return the characters of a message's texts that a chat template may render, or leave out."""
    calls = message.tool_calls or ()
    given = sum(len(call.function.name) + len(call.function.arguments) for call in calls)
    return given + len(message.reasoning_content or "") + len(message.name or "")


def _reason(reason: str | None, parser: MessageParser) -> str | None:
    """Return the reason for the end of a message: `tool_calls` instead of `stop` if it has calls."""
    return "tool_calls" if reason == "stop" and parser.calls else reason
