"""Public chat templates render as transformers renders them. Their texts are others' and aren't kept here.

`EXEGPT_CHAT_TEMPLATES=DIRECTORY pytest tests/xserver/text/test_public_templates.py` takes every `*.jinja` of it.
"""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from jinja2 import TemplateError

from tests.xserver.text.test_chat_template import CHAT, NAMED, TOKENS, oracle
from xserver.http.api_error import ApiError
from xserver.http.schemas import Conversation
from xserver.text.chat_template import ChatTemplate
from xserver.text.conversation import prompt_of

VARIABLE = "EXEGPT_CHAT_TEMPLATES"
USER = {"role": "user", "content": "Hi"}
ODD = {"role": "user", "content": "  木 <b>&amp;</b> 'q' \"q\" 🦉\t"}
BLANK = {"role": "assistant", "content": "\n"}
ASKED = [USER, {"role": "assistant", "content": " Ho!\n"}, ODD]
CONVERSATIONS = {
    "one turn": [USER],
    "three turns": ASKED,
    "seven turns": [*ASKED, *ASKED[1:], *ASKED[1:]],
    "a system message": CHAT,
    "a system message alone": CHAT[:1],
    "a system message late": [*ASKED, CHAT[0]],
    "two system messages": [CHAT[0], {"role": "system", "content": "Be brief.\n"}, *ASKED],
    "nothing said": [{"role": "system", "content": ""}, {"role": "user", "content": ""}],
    "two of the user": [USER, USER],
    "the assistant first": ASKED[1:],
    "the assistant last": CHAT[:3],
    "names, and a tool": NAMED,
    "thoughts": [USER, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."}, USER],
    "Jinja and marks": [{"role": "user", "content": "{{ 7 * 7 }} {% raw %} <|im_end|> [/INST] </s> \\n {%"}],
    "lines": [{"role": "user", "content": "\n\n a \r\n\n  b  \u2028 c \u00a0\n"}, BLANK, USER],
}
OPTIONS = ({}, {"enable_thinking": False}, {"enable_thinking": True, "date_string": "26 Jul 2024", "thinking": True})


def pytest_generate_tests(metafunc):
    """A test for each template: the variable is read when tests are collected."""
    named = os.environ.get(VARIABLE)
    if named is None:
        skipped = pytest.mark.skip(f"set {VARIABLE} to a directory of public chat templates (*.jinja)")
        metafunc.parametrize("file", [pytest.param(None, marks=skipped, id="none")])
    else:
        metafunc.parametrize("file", files := sorted(Path(named).glob("*.jinja")), ids=[file.stem for file in files])


def ours(template: ChatTemplate, conversation, **options) -> str | None:
    """What the server makes of a body; None where it refuses it."""
    model = SimpleNamespace(chat_template=template, longest_text=100_000)
    try:
        return prompt_of(Conversation(messages=conversation, **options), model)
    except ApiError:
        return None


def theirs(source: str, conversation, chat_template_kwargs=None, **options) -> str | None:
    """What transformers makes of it; None where the template or transformers refuses it."""
    try:
        return oracle(source, conversation, **(chat_template_kwargs or {}), **options)
    except (TemplateError, TypeError, ValueError, AttributeError, KeyError, IndexError):
        return None


def test_a_public_template_renders_as_transformers_do(file):
    source = file.read_text(encoding="utf-8")
    template, rendered = ChatTemplate(source, TOKENS), 0
    for name, conversation in CONVERSATIONS.items():
        for prompt in (False, True):
            for options in OPTIONS:
                body = {"add_generation_prompt": prompt, "chat_template_kwargs": options}
                want = theirs(source, conversation, **body)
                assert ours(template, conversation, **body) == want, (name, body)
                rendered += want is not None
    assert rendered >= 6, "the template refuses nearly every conversation: nothing is compared"


def test_a_public_template_continues_as_transformers_do(file):
    source, body = file.read_text(encoding="utf-8"), {"continue_final_message": True}
    for name in ("the assistant last", "thoughts", "lines"):
        conversation = CONVERSATIONS[name]
        spoken = conversation[: 1 + max(i for i, message in enumerate(conversation) if message["role"] == "assistant")]
        assert ours(ChatTemplate(source, TOKENS), spoken, **body) == theirs(source, spoken, **body), name


def test_a_developer_is_a_system_and_parts_are_lines(file):
    source, developer = file.read_text(encoding="utf-8"), {"role": "developer", "content": "Be kind."}
    parts = {"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "木"}]}
    plain = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "a \n木"}]
    want = theirs(source, plain, add_generation_prompt=True)
    assert ours(ChatTemplate(source, TOKENS), [developer, parts], add_generation_prompt=True) == want
