"""Grammars of tool calls, in llguidance's Lark: an output that calls tools, or text from whose trigger on it must."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from xserver.text.tool_calls import ToolFormat

_MARK = re.compile(r"(<[^<>\n]+>|\[[A-Z_]+\])")
"""Marks of calls and of reasoning, which are often tokens of their own."""


ONE_LINE = {"whitespace_pattern": "[ ]?"}
"""llguidance's option for JSON with at most a space between elements; otherwise a model may generate nothing else."""


_SPACES = 4
"""Maximum white space around the reasoning, in characters: a model may otherwise generate nothing else."""


@dataclass(frozen=True)
class Tool:
    """A function that a model may call."""

    name: str
    description: str | None
    parameters: dict[str, object] | None
    """A JSON schema of an object; None: no arguments."""
    strict: bool = False

    @property
    def document(self) -> dict[str, object]:
        """The tool as chat templates expect it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}

    @property
    def schema(self) -> dict[str, object]:
        """The schema of its arguments, on one line; unless the tool is strict, keys without support are ignored."""
        schema = without_neutral(self.parameters or {"type": "object", "properties": {}})
        return {"type": "object"} | schema | {"x-guidance": ONE_LINE | ({} if self.strict else {"lenient": True})}


def without_neutral(schema: Mapping[str, object]) -> dict[str, object]:
    """Return a schema without `uniqueItems: false`, which has no effect and which llguidance doesn't support."""
    return {key: _within(value) for key, value in schema.items() if not (key == "uniqueItems" and value is False)}


def _within(value: object) -> object:
    if isinstance(value, dict):
        return without_neutral(value)
    return [_within(each) for each in value] if isinstance(value, list) else value


def tool_grammar(
    kind: ToolFormat,
    tools: Sequence[Tool],
    required: bool,
    parallel: bool,
    special: Callable[[str], int | None],
    response: str | None = None,
    thinking: "Thinking | None" = None,
) -> str:
    """Return the grammar of an output that may call these tools.

    Args:
        kind: The format of calls.
        tools: The tools that may be called.
        required: Whether the output must call a tool; otherwise it is text, and constrained from a trigger on.
        parallel: Whether several calls may follow each other.
        special: Returns the id of a text that is one token which llguidance takes for a special one, else None.
        response: The grammar of an output without calls, as a Lark expression; None: any text.
        thinking: The reasoning before the calls or the text; None: there is none.
    """
    names = [f"call_{i}" for i in range(len(tools))]
    rules = [
        f'{name}: {_text(f"""{{"name": {json.dumps(tool.name)}, "{kind.arguments}": """)} '
        f"%json {json.dumps(tool.schema)} {_text('}')}"
        for name, tool in zip(names, tools, strict=True)
    ]
    more = f" ({lark_text(kind.separator, special)} call)*" if parallel else ""
    calls = f"{_text(kind.begin)} call{more} {lark_text(kind.end, special)}"
    trigger = lark_text(kind.trigger, special)
    rules += [f"call: {' | '.join(names)}", f"calls: {calls}", r"TEXT: /(.|\n)*/"]
    if required:
        start = f"{trigger if kind.trigger and not kind.optional else ''} calls"
    elif response is not None:
        start = f"{trigger}{'?' if kind.trigger and kind.optional else ''} calls | {response}"
    elif kind.optional:
        known = "|".join(tool.name.replace(".", r"\.") for tool in tools)
        rules.append(rf"FREE: TEXT & ~/[ \n]*\{{\"name\": \"({known})\"(.|\n)*/")
        start = f"{trigger + '?' if kind.trigger else ''} calls | FREE"
    else:
        rules.append(f"told: TEXT {trigger}" if trigger.startswith("<[") else f"told[lazy]: TEXT {trigger}")
        start = "told calls | TEXT"
    return "\n".join([*_beginning(thinking), f"answer: {start}", *rules])


@dataclass(frozen=True)
class Thinking:
    """The reasoning before an answer; `begun`: whether the prompt has begun it already."""

    begin: str
    """The Lark expression of the text that begins it."""
    end: str
    begun: bool


def answer_grammar(answer: str, thinking: Thinking | None) -> str:
    """Return the grammar of an answer, given as a Lark expression, after its reasoning."""
    return "\n".join([*_beginning(thinking), f"answer: {answer}", r"TEXT: /(.|\n)*/"])


def _beginning(thinking: Thinking | None) -> list[str]:
    """Return the first rules: reasoning, if there may be any, and the answer."""
    if thinking is None:
        return ["%llguidance {}", "start: answer"]
    thought = (
        f"thought[lazy]: TEXT {thinking.end}" if not thinking.end.startswith("<[") else f"thought: TEXT {thinking.end}"
    )
    begin = "thought SPACE?" if thinking.begun else f"(SPACE? {thinking.begin} thought SPACE?)?"
    return ["%llguidance {}", f"start: {begin} answer", thought, rf"SPACE: /\s{{1,{_SPACES}}}/"]


def lark_text(text: str, special: Callable[[str], int | None]) -> str:
    """Return the Lark expression of a text, whose marks may be special tokens."""
    parts = []
    for part in _MARK.split(text):
        token = special(part) if part else None
        parts.append(_text(part) if token is None else f"<[{token}]>")
    return " ".join(filter(None, parts))


def _text(text: str) -> str:
    return json.dumps(text) if text else ""
