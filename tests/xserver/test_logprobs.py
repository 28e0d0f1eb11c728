"""Log-probabilities of both APIs are transformers', with the tokens' texts, bytes and places."""

import json

import pytest

from tests.xserver.http.test_completions import events

PROMPT = list("Hé 木".encode())
"""Ids of other characters than these: the vocabulary is sorted by letter, and every id is one byte."""


@pytest.fixture(scope="module")
def theirs(model):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def log_probs(ids):
        with torch.no_grad():
            return network(torch.tensor([ids])).logits[0].log_softmax(-1)

    return log_probs


@pytest.fixture(scope="module")
def tokenizer(model):
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(model)


def post(server, path, **body):
    status, _, data = server.post(path, {"ignore_eos": True, "return_token_ids": True} | body)
    assert status == 200, data
    return data


def test_a_chats_log_probabilities_are_the_models_own(server, theirs, tokenizer):
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 8, "temperature": 1.5, "seed": 1}
    body |= {"logprobs": True, "top_logprobs": 3, "logit_bias": {"5": 3}}
    answer = json.loads(post(server, "/v1/chat/completions", **body))
    (choice,) = answer["choices"]
    prompt, output = answer["prompt_token_ids"], choice["token_ids"]
    rows = theirs(prompt + output)[len(prompt) - 1 : -1]
    content = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None and len(content) == len(output) == 8
    for entry, token, row in zip(content, output, rows, strict=True):
        best, ids = row.topk(3)
        assert entry["logprob"] == pytest.approx(row[token].item(), abs=1e-4)
        assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx(best.tolist(), abs=1e-4)
        if token < 256:
            assert entry["token"] == tokenizer.decode([token]) and len(entry["bytes"]) == 1
        assert [top["token"] for top in entry["top_logprobs"]] == [
            tokenizer.decode([i]) if i != 256 else "<|endoftext|>" for i in ids.tolist()
        ]
    plain = [i for i, token in enumerate(output) if token < 256]
    data = b"".join(bytes(content[i]["bytes"]) for i in plain)
    assert data.decode("utf-8", "replace") == choice["message"]["content"]
    chunks = events(post(server, "/v1/chat/completions", **body, stream=True))
    streamed = [e for c in chunks for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == content


def test_a_completions_log_probabilities_have_places_in_the_text(server, theirs):
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "logprobs": 2, "echo": True}
    (choice,) = json.loads(post(server, "/v1/completions", **body))["choices"]
    logprobs, ids = choice["logprobs"], PROMPT + choice["token_ids"]
    rows = theirs(ids)
    assert {len(values) for values in logprobs.values()} == {len(ids)}
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    own = [rows[i][token].item() for i, token in enumerate(ids[1:])]
    assert logprobs["token_logprobs"][1:] == pytest.approx(own, abs=1e-4)
    for i, top in enumerate(logprobs["top_logprobs"][1:]):
        assert 1 <= len(top) <= 3 and top[logprobs["tokens"][i + 1]] >= own[i] - 1e-4
        assert max(top.values()) == pytest.approx(rows[i].max().item(), abs=1e-4)
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token or "\ufffd" in token or token.startswith("<|")
    chunks = events(post(server, "/v1/completions", **body, stream=True))
    for key, values in logprobs.items():
        assert [value for c in chunks for value in c["choices"][0]["logprobs"][key]] == values
    assert "".join(c["choices"][0]["text"] for c in chunks) == choice["text"]


def test_a_prompt_alone_is_echoed_with_its_log_probabilities(server):
    body = {"prompt": [PROMPT, PROMPT[:2]], "max_tokens": 0, "echo": True}
    answer = json.loads(post(server, "/v1/completions", **body, logprobs=0))
    longer, shorter = answer["choices"]
    assert answer["usage"]["completion_tokens"] == 0 and longer["token_ids"] == []
    assert longer["finish_reason"] == "length" and longer["text"].startswith(shorter["text"][:1])
    assert len(longer["logprobs"]["tokens"]) == len(PROMPT)
    assert shorter["logprobs"]["token_logprobs"] == longer["logprobs"]["token_logprobs"][:2]
    assert [len(top) for top in longer["logprobs"]["top_logprobs"][1:]] == [1] * (len(PROMPT) - 1)
    (plain, _) = json.loads(post(server, "/v1/completions", **body))["choices"]
    assert plain["text"] == longer["text"] and plain["logprobs"] is None


@pytest.mark.parametrize("prompt", [[72, 256, 105, 299, 256, *PROMPT], "H<|endoftext|>i 木", [[256], [72, 256]]])
@pytest.mark.parametrize(
    "options", [{}, {"n": 2, "temperature": 1.0, "seed": 3}, {"stop": ["a", "e"], "max_tokens": 30}]
)
def test_the_echo_has_the_text_of_each_token(server, prompt, options):
    """Special tokens were left out of the text, so that places were those of other text."""
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "logprobs": 0, "echo": True, **options}
    body["logit_bias"] = {"256": -100}  # a special token of an output has no text
    choices = json.loads(post(server, "/v1/completions", **body))["choices"]
    chunks = [c["choices"][0] for c in events(post(server, "/v1/completions", **body, stream=True))]
    for choice in choices:
        logprobs, text = choice["logprobs"], choice["text"]
        assert "<|endoftext|>" in text and len(logprobs["tokens"]) > 1
        cut = len(text)
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert offset <= cut and ("\ufffd" in token or text[offset:].startswith(token) or offset == cut)
        streamed = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in streamed) == text
        for key, values in logprobs.items():
            assert [value for chunk in streamed for value in chunk["logprobs"][key]] == values
    plain = json.loads(post(server, "/v1/completions", **body | {"logprobs": None, "max_tokens": 0, "n": 1}))["choices"]
    assert all("<|endoftext|>" in choice["text"] for choice in plain)


def test_a_stop_text_cuts_text_but_not_the_prompts_log_probabilities(server):
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "echo": True, "logprobs": 0}
    whole = json.loads(post(server, "/v1/completions", **body | {"echo": False}))["choices"][0]
    (cut,) = json.loads(post(server, "/v1/completions", **body, stop=whole["text"][3:5]))["choices"]
    assert cut["finish_reason"] == "stop" and len(cut["token_ids"]) < 40
    assert len(cut["logprobs"]["tokens"]) == len(PROMPT) + len(cut["token_ids"])


def test_tokens_are_kept_out_until_the_least_number(server):
    body = {"prompt": "a", "max_tokens": 20, "logit_bias": {"256": 100}, "ignore_eos": False}
    ended = json.loads(post(server, "/v1/completions", **body))
    assert ended["usage"]["completion_tokens"] == 1 and ended["choices"][0]["finish_reason"] == "stop"
    later = json.loads(post(server, "/v1/completions", **body, min_tokens=5))
    assert later["usage"]["completion_tokens"] == 6 and 256 not in later["choices"][0]["token_ids"][:5]
    for key, value in (("min_tokens", 21), ("stop_token_ids", [300])):
        status, _, data = server.post("/v1/completions", body | {key: value})
        assert (status, json.loads(data)["error"]["param"]) == (400, key)


def test_a_response_format_is_followed(server):
    talk = [{"role": "user", "content": "a"}]
    blanks = json.loads(server.post("/tokenize", {"prompt": " \t\n\r"})[2])["tokens"]
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 23]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    for kind, check in ((wanted, lambda made: made["a"] in (1, 23)), ({"type": "json_object"}, lambda made: True)):
        body = {"messages": talk, "response_format": kind, "seed": 3, "ignore_eos": False}
        body["logit_bias"] = {str(blank): -100 for blank in blanks}
        (choice,) = json.loads(post(server, "/v1/chat/completions", **body))["choices"]
        if choice["finish_reason"] == "stop":
            made = json.loads(choice["message"]["content"])
            assert isinstance(made, dict) and check(made)
        else:
            assert kind["type"] == "json_object" and choice["message"]["content"].lstrip().startswith("{")
    bad = wanted | {"json_schema": {"name": "n", "schema": {"type": "nothing"}}}
    remote = wanted | {"json_schema": {"name": "n", "schema": {"$ref": "http://example.com/schema"}}}
    for form in (bad, remote, {"type": "json_schema"}):
        status, _, data = server.post("/v1/chat/completions", {"messages": talk, "response_format": form})
        error = json.loads(data)["error"]
        assert (status, error["param"], error["code"]) == (400, "response_format", "invalid_value")
