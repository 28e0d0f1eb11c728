"""The served model as the frontend knows it: limits, tokenizer, chat template; no weights."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from xcore.document import read_json
from xcore.errors import InputError
from xcore.requests.request import Request
from xcore.requests.request_lists import grammar_check
from xcore.specs.model import ModelSpec
from xcore.specs.workload import MAX_TOKENS
from xcore.tokenizer import encode, load_tokenizer
from xserver.http.errors import invalid
from xserver.text.chat_template import ChatTemplate
from xserver.text.token_bytes import TokenBytes

_SHOWN = 300
"""Characters of another library's error that a client sees."""


@dataclass(frozen=True)
class ServedModel:
    """A model directory with the name that clients use."""

    name: str
    directory: Path
    spec: ModelSpec
    tokenizer: Any
    """None if the directory has no tokenizer: prompts are then token ids, and outputs have no text."""
    created: int
    chat_template: ChatTemplate | None = None

    @staticmethod
    def read(directory: Path, name: str | None, chat_template: Path | None = None) -> "ServedModel":
        """Read the model of a directory, optionally with another chat template. InputError if they can't be read."""
        spec = ModelSpec.from_directory(directory)
        tokenizer = load_tokenizer(directory)
        if tokenizer is None:
            raise InputError(f"'{directory}' has no tokenizer.json: a server needs one.")
        template = ChatTemplate.read(directory, chat_template)
        return ServedModel(name or directory.resolve().name, directory, spec, tokenizer, int(time.time()), template)

    @property
    def card(self) -> dict[str, Any]:
        """Its model card."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "exegpt",
            "max_model_len": self.spec.longest_request,
        }

    @cached_property
    def eos(self) -> tuple[int, ...]:
        """The end-of-text tokens for the engine: those of generation_config.json, if it has any."""
        for file in ("generation_config.json", "config.json"):
            ids = self.config(file).get("eos_token_id")
            if ids is not None:
                known = ids if isinstance(ids, list) else [ids]
                if not all(isinstance(token, int) for token in known):
                    raise InputError(f"eos_token_id in '{self.directory / file}' is {ids!r}: it must be whole numbers.")
                return tuple(known)
        return ()

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """Its tokens' bytes."""
        return TokenBytes(self.tokenizer)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token."""
        return max((len(token) for token in self.tokenizer.get_vocab()), default=1)

    @property
    def longest_request(self) -> int:
        """Most tokens of a request, where the engine's cache doesn't hold fewer."""
        return self.spec.longest_request or MAX_TOKENS

    @property
    def longest_text(self) -> int:
        """Maximum characters of a text that can fit the context."""
        return self.longest_request * self.longest_token

    def encode(self, text: str, special: bool = True, param: str = "prompt") -> list[int]:
        """The token ids of a text; ApiError where it can't fit the context, before it is tokenized, or
        can't be encoded.
        """
        if len(text) > self.longest_text:
            raise invalid(
                f"This model's maximum context length is {self.longest_request} tokens: the text is longer.",
                param,
                "context_length_exceeded",
            )
        try:
            return encode(self.tokenizer, text, special)
        except InputError as error:
            raise invalid(f"This is refused: {str(error)[:_SHOWN]}", param) from None

    def spans(self, text: str) -> tuple[tuple[int, int], ...]:
        """Where each of a text's tokens is in it, in code points; (0, 0) for one that the tokenizer adds."""
        return tuple(self.tokenizer.encode(text).offsets)

    @cached_property
    def _grammar_check(self) -> Callable[[Request], None]:
        return grammar_check(self.directory, self.spec, prepare=True)

    def prepare_grammars(self) -> None:
        """Prepare the tokenizer for grammars, so that no answer waits for it."""
        _ = self._grammar_check

    def check_grammar(self, request: Request) -> None:
        """ApiError if outputs can't follow a request's grammar."""
        if request.grammar is None:
            return
        try:
            self._grammar_check(request)
        except InputError as error:
            why = str(error).partition(" has a grammar, and ")[2]
            raise invalid(f"'response_format' can't be followed: {why[:_SHOWN]}", "response_format") from None

    def config(self, file: str) -> dict[str, Any]:
        """A JSON file of the directory; empty where it has none."""
        path = self.directory / file
        document = read_json(path) if path.is_file() else {}
        if not isinstance(document, dict):
            raise InputError(f"'{path}' is not a JSON object.")
        return document
