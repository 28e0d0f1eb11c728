"""Tool calls are found in an output's text, in whatever pieces it arrives; all other text stays as it is."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xcore.errors import InputError
from xserver.text.tool_calls import (
    FORMATS,
    HERMES,
    JSON,
    LLAMA3,
    MISTRAL,
    CallDelta,
    ToolCallParser,
    format_named,
    format_of_template,
)

F, G = '{"name": "f", "arguments": {"a": "}\\"{"}}', '{"name": "g", "arguments": {}}'
HERMES_TWO = f"<tool_call>\n{F}\n</tool_call>\n<tool_call>\n{G}\n</tool_call>"
A_IS_1 = ("f", '{"a": 1}')
BOTH = [("f", '{"a": "}\\"{"}'), ("g", "{}")]


def parsed(kind, text, seed=None):
    """The text and the calls of an output that arrives whole, or in random pieces."""
    parser, parts, place, rng = ToolCallParser(kind, frozenset({"f", "g"})), [], 0, random.Random(seed)
    while place < len(text):
        size = rng.randint(1, 6) if seed is not None else len(text)
        parts += parser.push(text[place : place + size])
        place += size
    parts += parser.finish()
    calls = {}
    for part in parts:
        if isinstance(part, CallDelta):
            name, arguments = calls.get(part.index, ("", ""))
            assert part.name is None or part.index not in calls
            calls[part.index] = (name + (part.name or ""), arguments + part.arguments)
    assert list(calls) == list(range(len(calls)))
    return "".join(part for part in parts if isinstance(part, str)), list(calls.values())


@pytest.mark.parametrize(
    ("kind", "text", "content", "calls"),
    [
        (HERMES, HERMES_TWO, "", BOTH),
        (HERMES, f"I ask. \n{HERMES_TWO}\n", "I ask.", BOTH),
        (HERMES, '<tool_call>{"arguments": {"x": [1]}, "name": "f"}</tool_call>\n So', "So", [("f", '{"x": [1]}')]),
        (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
        (HERMES, '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', None, []),
        (HERMES, "a < b <tool_cal", None, []),
        (HERMES, "x <tool_call> no JSON </tool_call> y", None, []),
        (
            LLAMA3,
            '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
            "",
            [("f", '{"a": 1}'), BOTH[1]],
        ),
        (LLAMA3, f"<|python_tag|>{G}", "", [BOTH[1]]),
        (LLAMA3, '{"answer": {"name": "f"}} ', None, []),
        (LLAMA3, f"See {G}", None, []),
        (MISTRAL, f"[TOOL_CALLS][{F}, {G}]", "", BOTH),
        (
            MISTRAL,
            'Now[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]x1[ARGS]{}',
            "Now",
            [("f", '{"a": 1}'), BOTH[1]],
        ),
        (MISTRAL, "[TOOL_CALLS] none", None, []),
        (JSON, f"{F}\n{G}", "", BOTH),
        (JSON, '{"name": "f"}', "", [("f", "{}")]),
        (JSON, '{"name": "f", "arguments": "{\\"a\\": 1}"}', "", [A_IS_1]),
        (JSON, " \n text \n", None, []),
    ],
)
def test_calls_and_text_of_each_format(kind, text, content, calls):
    expected = (text if content is None else content, calls)
    assert parsed(kind, text) == expected
    assert all(parsed(kind, text, seed) == expected for seed in range(40))


PIECES = [
    *("<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', '{"a": 1}', "}", " ", "\n", "x"),
    *("[TOOL_CALLS]", "[", "]", ";", "f[ARGS]", "{", '"', "<|python_tag|>"),
]


@given(st.lists(st.sampled_from(PIECES), max_size=9), st.sampled_from(list(FORMATS.values())), st.integers(0, 99))
def test_pieces_change_nothing_and_no_text_is_lost(pieces, kind, seed):
    text = "".join(pieces)
    whole = parsed(kind, text)
    assert parsed(kind, text, seed) == whole
    assert whole[1] or whole[0] == text


@given(st.recursive(st.none() | st.integers() | st.text(), lambda s: st.lists(s) | st.dictionaries(st.text(), s)))
def test_arguments_come_as_they_were_written(value):
    arguments = json.dumps({"value": value}, ensure_ascii=False)
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    assert parsed(HERMES, text, 3) == ("", [("f", arguments)])


def test_a_long_object_that_is_no_call_is_passed_on_at_once():
    """Waiting for its end would take time that grows with the square of its length."""
    parser = ToolCallParser(JSON, frozenset({"f"}))
    given = "".join(part for _ in range(2000) for part in parser.push('{"a": '))
    assert len(given) > 10_000


def test_formats_are_those_that_templates_teach():
    assert format_of_template("{{ messages }}") is JSON
    assert format_of_template("{{ tools }} <tool_call>") is HERMES
    assert format_of_template("{{ tools }} [TOOL_CALLS]") is MISTRAL
    assert format_of_template('{{ tools }} {"name":, "parameters":') is LLAMA3
    assert format_of_template("{{ tools }} <tool_call><function=name>") is None
    with pytest.raises(InputError, match="There is no tool format 'xml': use hermes"):
        format_named("xml")
