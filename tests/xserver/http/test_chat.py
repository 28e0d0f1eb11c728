"""Chat completions: the prompt is transformers' own, the answer its tokens, whole and streamed."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.exegpt.cli.conftest import run_command
from tests.xserver.conftest import schedule_for
from tests.xserver.http.test_completions import UNCACHED, events, expected
from xserver.http.api_error import ApiError
from xserver.http.chat import ChatAnswer
from xserver.http.frontend import Frontend
from xserver.http.schemas import ChatRequest, Conversation, Message
from xserver.http.served_model import ServedModel
from xserver.text.conversation import prompt_of
from xserver.text.message_formats import MessageFormats

PATH = "/v1/chat/completions"
TALK = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello 木"}]


def answered(server, **body):
    status, _, data = server.post(PATH, {"messages": TALK} | body)
    assert status == 200, data
    return json.loads(data)


def refused(server, path=PATH, **body):
    status, _, data = server.post(path, body)
    error = json.loads(data)["error"]
    return status, error["param"], error["code"]


def test_an_answer_is_that_of_transformers_template_and_tokens(server, model):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(model)
    ids = theirs.apply_chat_template(TALK, add_generation_prompt=True, return_dict=False)
    answer = answered(server, temperature=0, ignore_eos=True, max_completion_tokens=12, return_token_ids=True)
    (choice,) = answer["choices"]
    assert answer["prompt_token_ids"] == ids and choice["token_ids"] == expected(model, ids, 12)
    text = theirs.decode(choice["token_ids"], skip_special_tokens=True)
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    usage = {"prompt_tokens": len(ids), "completion_tokens": 12, "total_tokens": len(ids) + 12}
    assert answer["usage"] == usage | UNCACHED


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(server):
    body = {"temperature": 0.9, "seed": 5, "n": 2, "ignore_eos": True, "max_tokens": 30}
    whole = answered(server, **body)["choices"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(server.post(PATH, {"messages": TALK} | body | options)[2])
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 60
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for choice in whole:
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert [c["delta"].get("role") for c in own] == ["assistant"] + [None] * (len(own) - 1)
        assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + ["length"]
        assert own[-1]["delta"] == {} and all("logprobs" in c for c in own)
        assert "".join(c["delta"].get("content", "") for c in own) == choice["message"]["content"]
    assert whole[0]["message"] != whole[1]["message"]


def test_a_cap_is_the_rest_of_the_context_where_none_is_given(server):
    usage = answered(server, ignore_eos=True)["usage"]
    assert usage["total_tokens"] == 128


def test_roles_and_parts_are_rendered(server):
    def tokens(*messages):
        return json.loads(server.post("/tokenize", {"messages": messages})[2])["tokens"]

    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    text = json.loads(server.post("/detokenize", {"tokens": tokens({"role": "developer", "content": parts})})[2])
    assert text == {"prompt": "system: a\nb\nassistant: "}
    again = {"role": "assistant", "content": "x", "refusal": None, "audio": None, "tool_calls": None}
    assert tokens(again) == tokens({"role": "assistant", "content": "x"})


def test_a_last_message_is_continued(server):
    talk = [*TALK, {"role": "assistant", "content": "I say "}]
    body = {"messages": talk, "continue_final_message": True, "temperature": 0, "max_tokens": 4, "ignore_eos": True}
    status, _, data = server.post(PATH, body | {"return_token_ids": True})
    prompt = json.loads(data)["prompt_token_ids"]
    text = json.loads(server.post("/detokenize", {"tokens": prompt})[2])["prompt"]
    assert status == 200 and text == "system: Be kind.\nuser: Hello 木\nassistant: I say "


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "messages", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "narrator", "content": "a"}]}, "messages", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages", "invalid_value"),
        ({"messages": [{"role": "user", "content": None}]}, "messages", "invalid_value"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "invalid_value"),
        ({"messages": TALK, "functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
        ({"messages": TALK, "tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"messages": TALK, "tools": [{"type": "web_search"}]}, "tools", "invalid_value"),
        ({"messages": TALK, "max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"messages": TALK, "max_completion_tokens": 200}, "max_completion_tokens", "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "x" * 500}]}, "messages", "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "x" * 100_000}]}, "messages", "context_length_exceeded"),
        ({"messages": TALK, "top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"messages": TALK, "stream_options": {}}, "stream_options", "invalid_value"),
        ({"messages": TALK, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "invalid_value"),
        ({"messages": TALK, "continue_final_message": True}, "continue_final_message", "invalid_value"),
        (
            {"messages": TALK, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "invalid_value",
        ),
    ],
)
def test_bad_conversations_are_refused(server, body, param, code):
    assert refused(server, **body) == (400, param, code)


def test_the_tokenizer_is_described(server):
    status, _, data = server.get("/tokenizer_info")
    info = json.loads(data)
    assert status == 200 and info["model_max_length"] == 128 and "messages" in info["chat_template"]
    eos = info["eos_token"]
    assert eos is None or len(json.loads(server.post("/tokenize", {"prompt": eos})[2])["tokens"]) == 1
    assert server.get("/tokenizer_info?model=other")[0] == 404


def test_texts_are_tokenized_and_back(server):
    tokenized = json.loads(server.post("/tokenize", {"prompt": "Hé", "return_token_strs": True})[2])
    assert tokenized["count"] == len(tokenized["tokens"]) == len(tokenized["token_strs"]) == 3
    assert tokenized["max_model_len"] == 128 and tokenized["token_strs"][0] == "H"
    assert json.loads(server.post("/detokenize", {"tokens": tokenized["tokens"]})[2]) == {"prompt": "Hé"}
    assert json.loads(server.post("/detokenize", {"tokens": [72, 256, 299]})[2])["prompt"]
    assert refused(server, "/detokenize", tokens=[72, 300]) == (400, "tokens", "invalid_value")
    assert refused(server, "/detokenize", tokens=[2**31 - 1]) == (400, "tokens", "invalid_value")
    assert refused(server, "/tokenize", text="a") == (400, "prompt", "invalid_value")
    assert refused(server, "/tokenize", prompt="a", model="other") == (404, "model", "model_not_found")
    assert refused(server, "/detokenize", tokens=["a"]) == (400, "tokens", "invalid_value")


def test_a_model_without_a_template_says_how_to_give_one(model, tmp_path):
    bare = ServedModel.read(model, None)
    bare = replace(bare, chat_template=None)
    with pytest.raises(ApiError, match="--chat-template") as error:
        prompt_of(Conversation(messages=[Message(role="user", content="a")]), bare)
    assert (error.value.status, error.value.code) == (400, "chat_template_missing")


def test_a_template_may_be_given(model, tmp_path):
    (tmp_path / "mine.jinja").write_text("{{ eos_token }}{{ messages[0].content }}!")
    given = ServedModel.read(model, None, MessageFormats(tmp_path / "mine.jinja"))
    talk = Conversation(messages=[Message(role="user", content="a")])
    assert prompt_of(talk, given) == "<|endoftext|>a!"


def test_where_all_is_reserved_the_cap_is_the_longest_output_of_the_schedule(model):
    reserving = replace(schedule_for(model), admission="reserve")
    for schedule, most in ((reserving, 16), (replace(reserving, admission="grow", kv_blocks=4), 54), (None, 118)):
        link = SimpleNamespace(opened=schedule and SimpleNamespace(schedule=schedule))
        frontend = Frontend(ServedModel.read(model, None), link, "", None, 1.0, 1)
        assert frontend.limited(10, None, "max_tokens") == most
        assert frontend.limited(10, 60, "max_tokens") == 60


def test_a_template_that_is_none_ends_the_command_with_a_sentence(model, tmp_path):
    (tmp_path / "broken.jinja").write_text("{% if %}")
    for name, why in (("none.jinja", "There is no chat template"), ("broken.jinja", "is not a Jinja template")):
        done = run_command("serve", "-m", model, "--chat-template", tmp_path / name)
        (line,) = done.err.strip().splitlines()
        assert done.code == 2 and name in line and why in line and line.endswith(".")


def test_texts_that_only_some_templates_render_are_tokenized_in_a_thread():
    called = {"function": {"name": "f", "arguments": "a" * 9000}}
    talk = [{"role": "assistant", "tool_calls": [called]}, {"role": "user", "content": "b" * 90, "name": "c" * 90}]
    body = ChatRequest.model_validate(
        {"messages": [*talk, {"role": "assistant", "reasoning_content": "d" * 500, "content": "e"}]}
    )
    frontend = SimpleNamespace(model=SimpleNamespace(name="m", longest_token=10), fingerprint="")
    bounds = ChatAnswer(body, frontend, "1").bounds(frontend)
    assert bounds.characters == 1 + 9000 + 90 + 90 + 500 + 1 and bounds.least_input == 9
