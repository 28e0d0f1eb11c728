"""The tools of a chat: which of them its output may call, and the grammar and parser of the output."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from xserver.http.api_error import invalid
from xserver.http.output_format import OutputFormat, thinking_of
from xserver.http.schemas import AllowedTools, ChatRequest, NamedTool
from xserver.http.served_model import ServedModel
from xserver.text.message_parts import MessageParser, Reasoning
from xserver.text.tool_calls import MISTRAL, CallDelta, ToolCallParser, ToolFormat
from xserver.text.tool_grammar import Tool, tool_grammar


@dataclass(frozen=True)
class OutputRules:
    """How the outputs of one conversation are constrained, and split into messages."""

    tools: tuple[Tool, ...]
    """The tools that the prompt shows."""
    callable: tuple[Tool, ...]
    """Those of them that may be called."""
    required: bool
    parallel: bool
    tool_format: ToolFormat | None
    reasoning: Reasoning | None
    begun: bool = False
    """Whether outputs begin inside the reasoning."""

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that the parser looks for, which may be special tokens."""
        tools = (self.tool_format.trigger, "[ARGS]", "[CALL_ID]") if self.callable and self.tool_format else ()
        return (*tools, *((self.reasoning.begin, self.reasoning.end) if self.reasoning else ()))

    def parser(self) -> MessageParser:
        """Return a parser for one output."""
        names = frozenset(tool.name for tool in self.callable)
        tools = ToolCallParser(self.tool_format, names) if self.tool_format and names else None
        return MessageParser(self.reasoning, tools, self.begun)

    def grammar(self, answer: OutputFormat | None, model: ServedModel, prompt: str) -> str | None:
        """Return the grammar of the outputs of a prompt; None for any text."""
        thinking = thinking_of(self.reasoning, model, prompt)
        if not (self.callable and self.tool_format):
            return answer.grammar(thinking) if answer else None
        if answer and answer.whole:
            raise invalid(f"'{answer.param}' has a grammar, which can't be combined with 'tools'.", answer.param)
        response = answer.lark if answer else None
        return tool_grammar(
            self.tool_format, self.callable, self.required, self.parallel, model.special_token, response, thinking
        )


def output_rules(body: ChatRequest, model: ServedModel) -> OutputRules:
    """Return the rules for a conversation's outputs; ApiError if its tools contradict each other."""
    tools = tuple(
        Tool(t.function.name, t.function.description, t.function.parameters, bool(t.function.strict))
        for t in body.tools or ()
    )
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise invalid("'tools' has two functions of one name.", "tools")
    choice, chosen = body.tool_choice, _chosen(body)
    if not chosen <= {*names}:
        raise invalid("'tool_choice' names a function that 'tools' doesn't have.", "tool_choice")
    if choice == "required" and not tools:
        raise invalid("'tool_choice' is 'required', but 'tools' has no functions.", "tool_choice")
    shown = () if choice == "none" else tools
    if shown and model.tool_format is None:
        raise invalid(
            "This server can't read the format in which the model calls tools: start it with --tool-parser.",
            "tools",
            "unsupported_parameter",
        )
    named = isinstance(choice, NamedTool)
    mode = choice.allowed_tools.mode if isinstance(choice, AllowedTools) else choice
    may_call = tuple(tool for tool in shown if not chosen or tool.name in chosen)
    parallel = body.parallel_tool_calls is not False and not named
    return OutputRules(shown, may_call, named or mode == "required", parallel, model.tool_format, model.reasoning)


def _chosen(body: ChatRequest) -> set[str]:
    """Return the functions that the choice names; empty if it names none, so that all may be called."""
    match body.tool_choice:
        case NamedTool() as tool:
            return {tool.function.name}
        case AllowedTools() as several:
            return {tool.function.name for tool in several.allowed_tools.tools}
    return set()


def call_id(answer_id: str, choice: int, call: int, kind: ToolFormat | None) -> str:
    """Return the id of a call, the same for every caller of an answer; Mistral's templates want nine characters."""
    digest = hashlib.sha256(f"{answer_id}/{choice}/{call}".encode()).hexdigest()
    return digest[:9] if kind is MISTRAL else f"call_{digest[:24]}"


def merged_deltas(deltas: Sequence[CallDelta]) -> list[CallDelta]:
    """Return one delta for each call."""
    merged: list[CallDelta] = []
    for delta in deltas:
        if merged and merged[-1].index == delta.index:
            merged[-1] = replace(merged[-1], arguments=merged[-1].arguments + delta.arguments)
        else:
            merged.append(delta)
    return merged


def whole_calls(deltas: Sequence[CallDelta]) -> list[tuple[str, str]]:
    """Return the name and the arguments of each call."""
    calls: dict[int, list[str]] = {}
    for delta in deltas:
        name_and_arguments = calls.setdefault(delta.index, ["", ""])
        name_and_arguments[0] += delta.name or ""
        name_and_arguments[1] += delta.arguments
    return [(name, arguments) for name, arguments in calls.values()]


def call_document(identity: str, name: str, arguments: str) -> dict[str, object]:
    """Return a call in the form of messages."""
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
