"""Chat templates: convert messages to a prompt, as transformers' `apply_chat_template` does."""

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes, pass_context
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from xcore.document import read_json, read_text
from xcore.errors import InputError
from xserver.http.api_error import ApiError, invalid

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SET_BY_SERVER = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
_OPTIONS = {"chat_template", "conversation", "tokenize", "padding", "truncation", "max_length", "return_tensors"}
"""Parameters of `apply_chat_template`, which clients can't use as variables of a template."""
_MARK = "END_OF_THE_MESSAGE_THAT_IS_CONTINUED "
_MOST_S = 5.0
"""Maximum time for rendering, in seconds."""
_SHOWN = 300
"""Maximum characters of a template's own error in an answer to a client."""
_MOST_SIZE = 2**24
"""Maximum characters, elements or bits of a product or power."""
_TURN, _UNTIL = "_turn", "_until"
"""Names in a template: the function that each iteration of a loop calls, and the time at which rendering must end."""


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's text for training, renders its body."""

    tags = {"generation"}  # noqa: RUF012 - as in jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the body in a separate scope."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Raised(TemplateError):
    """Raised by a template that refuses its input."""


def _raise(message: object) -> None:
    raise _Raised(str(message))


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, for templates that may not end.

    Each iteration of a loop checks the clock. Results of `*` and `**` have limited sizes, large enough for prompts.
    """

    intercepted_binops = frozenset({"*", "**"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            turn = nodes.ExprStmt(nodes.Call(nodes.Name(_TURN, "load"), [], [], None, None), lineno=loop.lineno)
            loop.body.insert(0, turn.set_lineno(loop.lineno).set_environment(self))
        return template

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Multiply or raise to a power, unless the result could fill the memory."""
        sizes = [len(value) if isinstance(value, str | list | tuple) else value for value in (left, right)]
        if all(isinstance(size, int) for size in sizes):
            bits = max(1, abs(sizes[0]).bit_length()) * abs(sizes[1]) if operator == "**" else 0
            repeated = any(isinstance(value, str | list | tuple) for value in (left, right))
            if bits > _MOST_SIZE or (repeated and abs(sizes[0] * sizes[1]) > _MOST_SIZE):
                raise _Raised(f"{operator} has a result that is too large")
        return super().call_binop(context, operator, left, right)


@pass_context
def _turn(context: Context) -> None:
    """Check the time in one iteration of a loop; ApiError after the end of the time."""
    if time.monotonic() > context[_UNTIL]:
        raise _too_long()


def _too_long() -> ApiError:
    return invalid("The conversation is too long.", "messages", "context_length_exceeded")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json  # Jinja's own escapes HTML
    environment.globals[_TURN] = _turn
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class ChatTemplate:
    """A model's chat template with its special tokens' names."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], name: str = "the chat template"):
        """Raise InputError if `source` is no template; `name` is its source in messages."""
        environment = _environment()
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise InputError(f"{name} is not a Jinja template (line {error.lineno}: {error.message}).") from None
        except Exception as error:  # for example too deep nesting, or code that Python rejects
            raise InputError(f"{name} is not a Jinja template ({str(error) or type(error).__name__}).") from None
        self.source = source
        self.takes_tools = "tools" in source
        """Whether it renders tools."""
        self._special_tokens = dict(special_tokens)
        self._reserved = {*environment.globals, *SPECIAL_TOKENS, *_SET_BY_SERVER, *_OPTIONS}

    @staticmethod
    def read(directory: Path, given: Path | None = None) -> "ChatTemplate | None":
        """Read the `given` file, or the template of a model directory; None if there is none.

        A directory's template is its `chat_template.jinja`, otherwise the one in its tokenizer_config.json. If that has
        several, it is the one with the name `default`. Raises InputError for a template that can't be read.
        """
        config = _document(directory / "tokenizer_config.json")
        special = _special_tokens(_document(directory / "special_tokens_map.json") | config)
        for path in (given, directory / "chat_template.jinja"):
            if path is not None and (path == given or path.is_file()):
                return ChatTemplate(read_text(path, "chat template"), special, f"'{path}'")
        source = config.get("chat_template")
        if isinstance(source, list):
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default")
        if source is None:
            return None
        where = f"chat_template in '{directory / 'tokenizer_config.json'}'"
        if not isinstance(source, str):
            raise InputError(f"{where} is not a string.")
        return ChatTemplate(source, special, where)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool,
        continue_final_message: bool,
        options: Mapping[str, object],
        longest: int,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> str:
        """Return the prompt of a conversation, with at most `longest` characters; `tools` may be called in it.

        With `continue_final_message` it ends at the end of the last message's text. Raises ApiError if the template
        refuses the conversation, or if an option's name is reserved.
        """
        reserved = next((name for name in options if name in self._reserved or name.startswith("_")), None)
        if reserved is not None:
            raise invalid("'chat_template_kwargs' has a reserved name.", "chat_template_kwargs")
        conversation, last = [dict(message) for message in messages], str(messages[-1]["content"])
        if continue_final_message:
            conversation[-1]["content"] = last + _MARK
        names = {
            **self._special_tokens,
            **options,
            "messages": conversation,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._rendered(names, longest)
        return _until_mark(text, last) if continue_final_message else text

    def _rendered(self, names: dict[str, object], longest: int) -> str:
        pieces, size, until = [], 0, time.monotonic() + _MOST_S
        try:
            for piece in self._template.generate(names | {_UNTIL: until}):
                pieces.append(piece)
                size += len(piece)
                if size > longest or time.monotonic() > until:
                    raise _too_long()
        except ApiError:
            raise
        except _Raised as error:
            why = f"The chat template refuses the conversation: {str(error)[:_SHOWN]}"
            raise invalid(why, "messages") from None
        except Exception as error:  # a template may use operations that values lack
            reason = str(error) if isinstance(error, TemplateError | TypeError) else ""
            why = f"The chat template can't render this conversation ({reason[:_SHOWN] or type(error).__name__})."
            raise invalid(why, "messages") from None
        return "".join(pieces)


def _until_mark(text: str, last: str) -> str:
    """Return the text before the mark, without a space that the template put in place of the message's last space."""
    place = text.rfind(_MARK.strip())
    if place < 0 or last.strip() not in text:
        raise invalid("The chat template omits the last message, so it can't be continued.", "messages")
    kept = text[place : place + len(_MARK)] == _MARK
    return text[:place] if kept else text[:place].rstrip()


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """Return the tokens by name; the config holds them as texts or as documents with a `content`."""
    tokens = {}
    for name in SPECIAL_TOKENS:
        token = config.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            tokens[name] = content
    return tokens


def _document(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    value = read_json(path)
    if not isinstance(value, dict):
        raise InputError(f"'{path}' is not a JSON object.")
    return value
