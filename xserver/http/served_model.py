"""The served model in the frontend: limits, tokenizer and chat template, without weights."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from xcore.document import read_json
from xcore.errors import InputError
from xcore.requests.request import Request
from xcore.requests.request_lists import grammar_check
from xcore.specs.model import ModelSpec
from xcore.specs.workload import MAX_TOKENS
from xcore.tokenizer import encode, load_tokenizer
from xserver.http.api_error import invalid
from xserver.text.chat_template import ChatTemplate
from xserver.text.message_formats import MessageFormats
from xserver.text.message_parts import Reasoning, reasoning_named
from xserver.text.token_bytes import TokenBytes
from xserver.text.tool_calls import ToolFormat, format_named, format_of_template

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_SHOWN = 300
"""Maximum characters of another library's error in an answer to a client."""


@dataclass(frozen=True)
class ServedModel:
    """A model directory with the name that clients use."""

    name: str
    directory: Path
    spec: ModelSpec
    tokenizer: "Tokenizer"
    created: int
    chat_template: ChatTemplate | None = None
    tool_format: ToolFormat | None = None
    """How it writes tool calls; None: in a way that this server can't read."""
    reasoning: Reasoning | None = None
    """How it marks its reasoning; None: the reasoning is a part of the text."""
    json_whitespace: bool = False
    """Whether JSON outputs may have any white space between their elements, not only single spaces."""

    @staticmethod
    def read(directory: Path, name: str | None, formats: MessageFormats | None = None) -> "ServedModel":
        """Read the model of a directory, by default with its own name and formats; InputError if it can't be read."""
        spec = ModelSpec.from_directory(directory)
        tokenizer = load_tokenizer(directory)
        if tokenizer is None:
            raise InputError(f"'{directory}' has no tokenizer.json: a server needs one.")
        formats = formats or MessageFormats()
        template = ChatTemplate.read(directory, formats.chat_template)
        taught = format_of_template(template.source) if template else None
        return ServedModel(
            name or directory.resolve().name,
            directory,
            spec,
            tokenizer,
            int(time.time()),
            template,
            format_named(formats.tool_parser) if formats.tool_parser else taught,
            reasoning_named(formats.reasoning_parser) if formats.reasoning_parser else None,
            formats.json_whitespace,
        )

    @property
    def card(self) -> dict[str, object]:
        """The model's card."""
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
        """The bytes of the model's tokens."""
        return TokenBytes(self.tokenizer)

    def special_token(self, text: str) -> int | None:
        """Return the id of a text that llguidance treats as one special token; None for other texts.

        It does so for the tokenizer's special tokens, and for all added tokens in angle brackets.
        """
        token = self.tokenizer.token_to_id(text)
        if token is None or token not in self.tokenizer.get_added_tokens_decoder():
            return None
        return token if self.token_bytes.special(token) or (text[:1] == "<" and text[-1:] == ">") else None

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token."""
        return max((len(token) for token in self.tokenizer.get_vocab()), default=1)

    @property
    def longest_request(self) -> int:
        """The maximum tokens of a request, if the engine's cache doesn't hold fewer."""
        return self.spec.longest_request or MAX_TOKENS

    @property
    def longest_text(self) -> int:
        """The maximum characters of a text that can fit the context."""
        return self.longest_request * self.longest_token

    def encode(self, text: str, special: bool = True, param: str = "prompt") -> list[int]:
        """Return the token ids of a text.

        Raises ApiError if the text can't be encoded, or can't fit the context (checked before it is tokenized).
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
            raise invalid(f"The text can't be tokenized: {str(error)[:_SHOWN]}", param) from None

    def spans(self, text: str) -> tuple[tuple[int, int], ...]:
        """Return the position of each of a text's tokens, in code points; (0, 0) for tokens that the tokenizer adds."""
        return tuple(self.tokenizer.encode(text).offsets)

    @cached_property
    def _grammar_check(self) -> Callable[[Request], None]:
        return grammar_check(self.directory, self.spec, prepare=True)

    def prepare_grammars(self) -> None:
        """Prepare the tokenizer for grammars, so that no answer waits for it."""
        _ = self._grammar_check

    def check_grammar(self, request: Request, param: str) -> None:
        """Raise ApiError, naming the key `param`, if outputs can't follow a request's grammar."""
        if request.grammar is None:
            return
        try:
            self._grammar_check(request)
        except InputError as error:
            why = str(error).partition(" has a grammar, and ")[2]
            raise invalid(f"The format of the output is not supported: {why[:_SHOWN]}", param) from None

    def config(self, file: str) -> dict[str, object]:
        """Read a JSON file of the directory; empty if it doesn't exist."""
        path = self.directory / file
        document = read_json(path) if path.is_file() else {}
        if not isinstance(document, dict):
            raise InputError(f"'{path}' is not a JSON object.")
        return document
