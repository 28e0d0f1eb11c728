"""Tool calls in an output's text: the formats that models are trained on, and a parser for streams."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from xcore.errors import InputError

Place = Literal["anywhere", "start"]


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes tool calls: `trigger` OBJECT `separator` OBJECT ... `end`."""

    name: str
    trigger: str
    """The text that announces calls; empty: an output that begins with a call's object."""
    begin: str
    """Text between the trigger and the first object."""
    separator: str
    end: str
    arguments: str = "arguments"
    """The key of the arguments in a call's object."""
    optional: bool = False
    """Whether the trigger may be missing where the output begins with a call's object."""


HERMES = ToolFormat("hermes", "<tool_call>", "\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
LLAMA3 = ToolFormat("llama3_json", "<|python_tag|>", "", "; ", "", "parameters", optional=True)
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "[", ", ", "]")
JSON = ToolFormat("json", "", "", "\n", "", optional=True)
FORMATS = {kind.name: kind for kind in (HERMES, LLAMA3, MISTRAL, JSON)}
"""Formats by the names that `--tool-parser` takes."""
_OTHER_FORMAT = "<function="
"""XML calls, as Qwen3-Coder writes them."""


def format_named(name: str) -> ToolFormat:
    """Return the format of a name; InputError if there is none."""
    if name not in FORMATS:
        raise InputError(f"There is no tool format '{name}': use {', '.join(FORMATS)}.")
    return FORMATS[name]


def format_of_template(source: str) -> ToolFormat | None:
    """Return the format that a chat template teaches; None if it teaches one that this server can't read.

    A template that doesn't mention tools gets the format `json`, described in a system message.
    """
    if "tools" not in source:
        return JSON
    if _OTHER_FORMAT in source:
        return None
    if MISTRAL.trigger in source:
        return MISTRAL
    if HERMES.trigger in source:
        return HERMES
    return LLAMA3 if LLAMA3.trigger in source or '"parameters"' in source else JSON


@dataclass(frozen=True)
class CallDelta:
    """New text of a call's arguments; the first delta of a call has its name."""

    index: int
    arguments: str
    name: str | None = None


Part = str | CallDelta
"""Text of the message, or an addition to a call."""
_MOST_HEAD = 512
"""Most characters of a call's object up to its arguments: waiting for longer ones would take time that grows with the
square of their length.
"""
_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\S)')
_NAMED = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]+\s*)?\[ARGS\]\s*(?=\S)")
"""Mistral's later form: a name, perhaps an id, and the arguments."""


class JsonScan:
    """Finds the end of a JSON object or list that arrives in pieces."""

    def __init__(self) -> None:
        self._depth, self._inside, self._escaped = 0, False, False

    def end(self, text: str, begin: int = 0) -> int:
        """Return the place after the value's end, or -1 if the text ends first."""
        for place in range(begin, len(text)):
            letter = text[place]
            if self._inside:
                self._inside, self._escaped = self._escaped or letter != '"', letter == "\\" and not self._escaped
            elif letter == '"':
                self._inside = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return place + 1
        return -1


class ToolCallParser:
    """Splits an output into text and calls of the tools in `names`, as its text arrives.

    What looks like a call, and is no call of a known tool, stays text. White space around calls is dropped.
    """

    def __init__(self, kind: ToolFormat, names: frozenset[str]):
        self._kind, self._names = kind, names
        self._gap = re.compile(rf"(?:{re.escape(kind.trigger)}|[\s,;\[\]])*" if kind.trigger else r"[\s,;\[\]]*")
        """What may stand between calls."""
        self._text = ""
        """Text that has arrived, and isn't a part of any delta yet. Outside free text it begins with a trigger."""
        self._free = True
        self._at_start = True
        self._called = False
        """Whether a call has followed the last trigger."""
        self._scan: JsonScan | None = None
        """The scan of the arguments that are passed on."""
        self._open = False
        """Whether the object around the last arguments is still open."""
        self._space = ""
        """White space that is text only if more text follows."""
        self._texts = False
        """Whether any text has been passed on."""
        self.calls = 0
        """Number of calls so far."""

    def push(self, text: str) -> list[Part]:
        """Return the parts that more text completes."""
        self._text += text
        return list(self._parts(final=False))

    def finish(self) -> list[Part]:
        """Return the remaining parts: text that was held back, or arguments that were cut off."""
        return list(self._parts(final=True))

    def _parts(self, final: bool) -> Iterator[Part]:
        before = None
        while before != (self._text, self._free, self._scan):
            before = (self._text, self._free, self._scan)
            if self._scan:
                yield from self._arguments()
            elif self._free:
                yield from self._pass_text(final)
            else:
                yield from self._call(final)
        if final and not self.calls and self._space:
            yield self._space

    def _pass_text(self, final: bool) -> Iterator[Part]:
        """Pass on text up to a trigger; hold back a suffix that may begin one."""
        if self._at_start:
            bare = self._text.lstrip()
            if not bare and not final:
                return
            self._at_start = False
            if self._kind.optional and bare.startswith("{"):
                self._free = self._called = False
                return
        trigger = self._kind.trigger
        place = self._text.find(trigger) if trigger else -1
        if place >= 0:
            yield from self._shown(place)
            self._free = self._called = False
        else:
            yield from self._shown(len(self._text) - (0 if final else begun(self._text, trigger)))

    def _shown(self, size: int) -> Iterator[Part]:
        """Pass on `size` characters of text, except white space at the end, or between a call and the first text."""
        text, self._text = self._space + self._text[:size], self._text[size:]
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            yield kept if self._texts or not self.calls else kept.lstrip()
            self._texts = True

    def _call(self, final: bool) -> Iterator[Part]:
        """Read up to a call's arguments, or to the end of the calls."""
        if self._open and (bare := self._text.lstrip()):
            self._open, self._text = False, bare.removeprefix("}")
        gap = self._gap.match(self._text)
        assert gap
        rest, end = self._text[gap.end() :], self._kind.end.strip()
        if self._called and rest.startswith(end) and len(end) > 1:
            self._text, self._free = rest[len(end) :], True
        elif head := self._head(rest):
            yield CallDelta(self.calls, "", head[0])
            self._scan, self._open, self._text = JsonScan(), rest[0] == "{", rest[head[1] :]
        elif whole := self._whole(rest):
            yield CallDelta(self.calls, whole[1], whole[0])
            self._text = rest[whole[2] :]
            self._ended()
        elif final or not self._may_follow(rest):
            trigger = self._kind.trigger
            if self._called:
                self._text = rest
            first = len(trigger) if trigger and self._text.startswith(trigger) else 1
            yield from self._shown(first)
            self._free = True

    def _head(self, text: str) -> tuple[str, int] | None:
        """Return the name of a call, and the place of its arguments; None if the text has no beginning of a call."""
        head = _HEAD.match(text) or _NAMED.match(text)
        if head is None or text[head.end()] != "{":
            return None
        name = _text_of(head[1]) if head[1].startswith('"') else head[1]
        return (name, head.end()) if name in self._names else None

    def _whole(self, text: str) -> tuple[str, str, int] | None:
        """Return the name and the arguments of a complete call with its keys in any order, and the place of its end."""
        end = JsonScan().end(text) if text.startswith("{") else -1
        call = _call_of(text[:end]) if end >= 0 else None
        return (*call, end) if call and call[0] in self._names else None

    def _may_follow(self, text: str) -> bool:
        """Return whether a text that is no call yet may become one."""
        if text.startswith("{"):
            return len(text) <= _MOST_HEAD and JsonScan().end(text) < 0
        ends = (self._kind.trigger, self._kind.end.strip())
        return begun(text, *ends) == len(text) or re.fullmatch(r"[\w.-]+\s*(\[[\w\[\]\s-]*)?", text) is not None

    def _arguments(self) -> Iterator[Part]:
        """Pass arguments on, up to the end of their object."""
        assert self._scan
        end = self._scan.end(self._text)
        given = self._text if end < 0 else self._text[:end]
        if given:
            yield CallDelta(self.calls, given)
        self._text = "" if end < 0 else self._text[end:]
        if end >= 0:
            self._scan = None
            self._ended()

    def _ended(self) -> None:
        self.calls, self._called = self.calls + 1, True


def begun(text: str, *wanted: str) -> int:
    """Return the length of the longest suffix of a text that begins one of the wanted texts, and is no whole one."""
    longest = max(map(len, wanted), default=0) - 1
    return next((n for n in range(min(len(text), longest), 0, -1) if any(w.startswith(text[-n:]) for w in wanted)), 0)


def _text_of(quoted: str) -> str | None:
    """Return the text of a JSON string; None if it has invalid escapes."""
    try:
        text: str = json.loads(quoted)
    except ValueError:
        return None
    return text


def _call_of(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments' JSON of a call's object; None if it isn't a call."""
    try:
        document = json.loads(text)
    except ValueError:
        return None
    name = document.get("name") if isinstance(document, dict) else None
    if not isinstance(name, str):
        return None
    given: object = next((document[key] for key in ("arguments", "parameters") if key in document), {})
    if isinstance(given, str):
        return name, given
    return name, json.dumps({} if given is None else given, ensure_ascii=False)
