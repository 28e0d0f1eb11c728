"""The parts of a message: its reasoning, its text and its tool calls, as the text of an output arrives."""

from collections.abc import Iterator
from dataclasses import dataclass

from xcore.errors import InputError
from xserver.text.tool_calls import CallDelta, ToolCallParser, begun


@dataclass(frozen=True)
class Reasoning:
    """How a model marks its reasoning."""

    begin: str = "<think>"
    end: str = "</think>"
    always: bool = False
    """Whether an output begins with reasoning even if it doesn't begin with the mark."""

    def begun_in(self, prompt: str) -> bool:
        """Return whether the output of a prompt begins inside the reasoning."""
        return self.always or prompt.rstrip().endswith(self.begin)


REASONING = {"qwen3": Reasoning(), "deepseek-r1": Reasoning(always=True), "think": Reasoning()}
"""Marks by the names that `--reasoning-parser` takes."""


def reasoning_named(name: str) -> Reasoning:
    """Return the marks of a name; InputError if there are none."""
    if name not in REASONING:
        raise InputError(f"There is no reasoning parser '{name}': use {', '.join(REASONING)}.")
    return REASONING[name]


@dataclass(frozen=True)
class Thought:
    """Text of the reasoning."""

    text: str


MessagePart = str | Thought | CallDelta
"""Text of the answer, text of the reasoning, or an addition to a call."""


class MessageParser:
    """Splits one output into the parts of its message."""

    def __init__(self, reasoning: Reasoning | None = None, tools: ToolCallParser | None = None, begun: bool = False):
        self._reasoning, self._tools = reasoning, tools
        self._thinking = begun and reasoning is not None
        self._may_think = reasoning is not None
        """Whether reasoning may still follow: nothing else has come."""
        self._text = ""
        self._bare = begun
        """Whether white space at the beginning of the next text is left out."""

    @property
    def calls(self) -> int:
        """The number of complete calls so far."""
        return self._tools.calls if self._tools else 0

    def push(self, text: str) -> list[MessagePart]:
        """Return the parts that more text completes."""
        return list(self._split(text, final=False))

    def finish(self) -> list[MessagePart]:
        """Return the remaining parts."""
        return list(self._split("", final=True))

    def _split(self, text: str, final: bool) -> Iterator[MessagePart]:
        self._text += text
        if self._reasoning and self._may_think:
            yield from self._think(self._reasoning, final)
        if self._may_think and not final:
            return
        answer, self._text = (self._text.lstrip() if self._bare else self._text), ""
        self._bare = self._bare and not answer
        if self._tools is None:
            if answer:
                yield answer
            return
        yield from self._tools.push(answer)
        if final:
            yield from self._tools.finish()

    def _think(self, marks: Reasoning, final: bool) -> Iterator[MessagePart]:
        """Pass on reasoning up to its end; hold back a suffix that may begin the mark of the end."""
        if not self._thinking:
            bare = self._text.lstrip()
            if bare.startswith(marks.begin):
                self._thinking, self._bare, self._text = True, True, bare[len(marks.begin) :]
            elif final or (bare and not marks.begin.startswith(bare)):
                self._may_think = False
                return
            else:
                return
        thought, mark, rest = self._text.partition(marks.end)
        if not mark and not final:
            held = begun(self._text, marks.end)
            thought, rest = self._text[: len(self._text) - held], self._text[len(self._text) - held :]
        thought = thought.lstrip() if self._bare else thought
        if thought:
            self._bare = False
            yield Thought(thought)
        self._text = rest
        if mark or final:
            self._may_think, self._bare = False, True
