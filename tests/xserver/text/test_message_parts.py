"""A message's reasoning, text and calls are told apart, in whatever pieces the output arrives."""

import random

import pytest

from xserver.text.message_parts import REASONING, MessageParser, Thought, reasoning_named
from xserver.text.tool_calls import HERMES, CallDelta, ToolCallParser


def parsed(text, name, begun=False, seed=None):
    parser = MessageParser(REASONING[name], ToolCallParser(HERMES, frozenset({"f"})), begun)
    parts, place, rng = [], 0, random.Random(seed)
    while place < len(text):
        size = rng.randint(1, 5) if seed is not None else len(text)
        parts += parser.push(text[place : place + size])
        place += size
    parts += parser.finish()
    thought = "".join(part.text for part in parts if isinstance(part, Thought))
    calls = "".join((part.name or "") + part.arguments for part in parts if isinstance(part, CallDelta))
    return thought, "".join(part for part in parts if isinstance(part, str)), calls


CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "begun", "expected"),
    [
        ("<think>\nso < </thi\n</think>\n\nHello ", False, ("so < </thi\n", "Hello ", "")),
        ("abc </think> x", True, ("abc ", "x", "")),
        ("\n<think>cut off", False, ("cut off", "", "")),
        ("  plain <think>", False, ("", "  plain <think>", "")),
        (f"<think></think>\n\n{CALL}", False, ("", "", "f{}")),
        (f"<think>{CALL}</think>no call", False, (CALL, "no call", "")),
        ("<thi", False, ("", "<thi", "")),
    ],
)
def test_reasoning_comes_before_the_answer(text, begun, expected):
    assert {parsed(text, "qwen3", begun, seed) for seed in (None, *range(40))} == {expected}


def test_deepseek_r1_reasons_without_a_mark_at_the_beginning():
    reasoning = reasoning_named("deepseek-r1")
    assert reasoning.begun_in("any prompt") and not reasoning_named("qwen3").begun_in("any prompt")
    assert reasoning_named("qwen3").begun_in("assistant: <think>\n")
    assert parsed("hm</think>yes", "deepseek-r1", begun=True) == ("hm", "yes", "")
