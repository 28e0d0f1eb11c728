"""`POST /v1/completions`: continue prompts, as one document or as a stream."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from xserver.admission.token_bounds import TokenBounds
from xserver.http.answering import ApiAnswer
from xserver.http.api_error import invalid
from xserver.http.frontend import Frontend
from xserver.http.generation import Choice, Piece
from xserver.http.output_format import output_format
from xserver.http.sampling_params import Wanted
from xserver.http.schemas import CompletionRequest
from xserver.http.served_model import ServedModel
from xserver.text.text_log_probs import PromptText, TextLogProb, completion_logprobs

MAX_PROMPTS = 256
DEFAULT_MAX_TOKENS = 16


class CompletionAnswer(ApiAnswer):
    """One request for completions."""

    prefix, kind = "cmpl-", "text_completion"
    body: CompletionRequest

    def bounds(self, frontend: Frontend) -> TokenBounds:
        """Return the bounds on tokens that follow from the prompts."""
        most = DEFAULT_MAX_TOKENS if self.body.max_tokens is None else self.body.max_tokens
        return TokenBounds.of_prompts(self._given, frontend.model.longest_token, self.body.n or 1, most)

    @property
    def _given(self) -> Sequence[str | Sequence[int]]:
        """The prompts as the body has them: texts or token ids."""
        prompt = self.body.prompt
        if isinstance(prompt, str):
            return [prompt]
        tokens = [token for token in prompt if isinstance(token, int)]
        return [tokens] if tokens else [each for each in prompt if not isinstance(each, int)]

    def prepare(self, frontend: Frontend) -> None:
        """Tokenize the prompts and make a choice for each of their `n` outputs."""
        body, model = self.body, frontend.model
        self.check_stream()
        self._token_bytes = model.token_bytes
        self._echoes: list[PromptText] = []
        """The echoed prompt of each choice; empty if the request wants no echo."""
        most = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        if most == 0 and not body.echo:
            raise invalid("'max_tokens' is 0: it must be at least 1, unless 'echo' is set.", "max_tokens")
        echoed = bool(body.echo and body.logprobs is not None)
        if echoed and model.spec.encoder_layers:
            raise invalid("An encoder-decoder does not support 'echo' with 'logprobs': remove one of them.", "echo")
        answer = output_format(body, model)
        grammar = answer.grammar(None) if answer else None
        wanted = Wanted(grammar, answer.param if answer else "", body.logprobs, echoed)
        for place, (text, ids) in enumerate(self._prompts(frontend)):
            limit = frontend.limited(len(ids), most, "max_tokens")
            self.add_choices(frontend, ids, limit, wanted, place)
            if body.echo:
                self._echoes += [self._echo(text, ids, model)] * (body.n or 1)

    def _echo(self, text: str | None, ids: Sequence[int], model: ServedModel) -> PromptText:
        """Return the echo of a prompt, which was a text or tokens."""
        if text is None:
            return PromptText.of(model.token_bytes, ids)
        return PromptText(text, model.spans(text) if self.body.logprobs is not None else None)

    def _prompts(self, frontend: Frontend) -> list[tuple[str | None, list[int]]]:
        several = self._given
        if not several or len(several) > MAX_PROMPTS:
            raise invalid(f"'prompt' has {len(several)} prompts: send 1 to {MAX_PROMPTS} in one request.", "prompt")
        tokenized = []
        for each in several:
            ids = frontend.model.encode(each) if isinstance(each, str) else list(each)
            tokenized.append((each if isinstance(each, str) else None, ids))
            if not ids:
                raise invalid("'prompt' is empty: it needs at least one token.", "prompt")
            if any(i >= frontend.model.spec.vocab for i in ids):
                raise invalid(f"'prompt' has a token id above {frontend.model.spec.vocab - 1}.", "prompt")
        return tokenized

    def choice(self, choice: Choice, text: str) -> dict[str, object]:
        """Return the document of a complete choice."""
        tokens = choice.output.tokens[: choice.taken]
        return self._choice(choice, text, choice.finish_reason, tokens, choice.logprobs, first=True)

    def deltas(self, piece: Piece, first: bool) -> Iterable[dict[str, object]]:
        """Yield one document with the text, if there is any."""
        echoed = first and self.body.echo
        if echoed or piece.text or piece.finish_reason or piece.logprobs or self.body.return_token_ids:
            yield self._choice(piece.choice, piece.text, piece.finish_reason, piece.tokens, piece.logprobs, first)

    def _choice(
        self,
        choice: Choice,
        text: str,
        reason: str | None,
        tokens: Sequence[int],
        logprobs: Sequence[TextLogProb],
        first: bool,
    ) -> dict[str, object]:
        """Return the document of new results of a choice; with an echo, the prompt comes before the `first` of them."""
        echo = self._echoes[choice.index].text if self.body.echo else ""
        document: dict[str, object] = {"index": choice.index, "text": echo + text if first else text, "logprobs": None}
        if self.body.logprobs is not None:
            entries = [replace(entry, offset=entry.offset + len(echo)) for entry in logprobs]
            prompt = self._prompt_logprobs(choice) if first and self.body.echo else []
            document["logprobs"] = completion_logprobs([*prompt, *entries])
        document["finish_reason"] = reason
        if self.body.return_token_ids:
            document["token_ids"] = list(tokens)
            if first:
                document["prompt_token_ids"] = list(choice.request.prompt_ids)
        return document

    def _prompt_logprobs(self, choice: Choice) -> list[TextLogProb]:
        request, logprobs = choice.request, choice.output.prompt_logprobs
        return self._echoes[choice.index].logprobs(self._token_bytes, request.prompt_ids, logprobs)
