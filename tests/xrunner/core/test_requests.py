"""Requests as people write them, and every way in which one can be wrong."""

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xcore.errors import InputError
from xcore.requests.request import Request
from xcore.requests.requests import is_trace, random_requests, read_requests
from xcore.specs.builtin_models import builtin_model
from xcore.specs.workload import RequestLengths

GPT2 = builtin_model("gpt2")  # vocabulary 50257, context 1024


def write(path, *lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def encode(text):
    return list(text.encode())


def test_requests_are_read_with_text_and_ids(tmp_path):
    source = write(
        tmp_path / "r.jsonl",
        {"id": "a", "prompt": "hi", "max_tokens": 3},
        "",
        {"id": "b", "prompt_ids": [5, 9], "max_tokens": 1, "ignore_eos": True, "arrival_s": 1.5, "temperature": 0},
    )
    requests, rejected = read_requests(source, GPT2, encode)
    assert requests == [Request("a", (104, 105), 3), Request("b", (5, 9), 1, True, 1.5)]
    assert rejected == []


def test_how_tokens_are_chosen_is_read(tmp_path):
    asked = {
        "frequency_penalty": 1,
        "presence_penalty": -0.5,
        "min_p": 0.1,
        "min_tokens": 2,
        "logprobs": 0,
        "prompt_logprobs": True,
    }
    lists = {"logit_bias": {"50256": -100, "7": 1.5}, "stop_token_ids": [3, 4], "grammar": "start: /a/"}
    ((request,), _) = read_requests(write(tmp_path / "r.jsonl", GOOD | asked | lists), GPT2, encode)
    rest = {"logit_bias": ((50256, -100.0), (7, 1.5)), "stop_token_ids": (3, 4), "grammar": "start: /a/"}
    assert request == Request("a", (1,), 2, **asked, **rest)
    nothing = dict.fromkeys((*asked, *lists))
    assert read_requests(write(tmp_path / "r.jsonl", GOOD | nothing), GPT2, encode)[0] == [Request("a", (1,), 2)]


@pytest.mark.parametrize("token", ["9" * 5000, "12345678901", "-1", "x", "²"])
def test_odd_token_ids_of_a_bias_are_refused(tmp_path, token):
    source = write(tmp_path / "r.jsonl", GOOD | {"logit_bias": {token: 1}})
    with pytest.raises(InputError, match="logit_bias"):
        read_requests(source, GPT2, encode)


def test_requests_come_from_standard_input(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO('{"id": "a", "prompt_ids": [1], "max_tokens": 2}\n'))
    assert read_requests("-", GPT2, None)[0] == [Request("a", (1,), 2)]


def piped(monkeypatch, data):
    """Standard input with these bytes, as a locale without letters beyond ASCII opens it."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), "ascii", "surrogateescape"))


def test_standard_input_is_utf8_with_or_without_a_mark_as_files_are(monkeypatch, tmp_path):
    data = b'\xef\xbb\xbf{"id": "\xc3\xa9", "prompt_ids": [1], "max_tokens": 2}\r\n'
    (tmp_path / "r.jsonl").write_bytes(data)
    piped(monkeypatch, data)
    assert read_requests("-", GPT2, None)[0] == read_requests(str(tmp_path / "r.jsonl"), GPT2, None)[0]
    piped(monkeypatch, b'{"id": "\xe9", "prompt_ids": [1], "max_tokens": 2}\n')
    with pytest.raises(InputError, match=r"^Standard input is not in UTF-8"):
        read_requests("-", GPT2, None)
    piped(monkeypatch, b"\n")
    with pytest.raises(InputError, match=r"^Standard input has no requests"):
        read_requests("-", GPT2, None)


GOOD = {"id": "a", "prompt_ids": [1], "max_tokens": 2}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{", "line 1 is not valid JSON"),
        ("[1]", "line 1 is not a JSON object"),
        ({"prompt_ids": [1], "max_tokens": 2}, "line 1 has no id"),
        (GOOD | {"id": 7}, "line 1 has no id"),
        (GOOD | {"id": ""}, "line 1 has no id"),
        (GOOD | {"max_tokens": -1}, "'a' has max_tokens = -1"),
        (GOOD | {"max_tokens": 0}, "'a' has max_tokens = 0"),
        (GOOD | {"max_tokens": "x"}, "'a' has max_tokens = 'x'"),
        ({"id": "a", "prompt_ids": [1]}, "'a' has no max_tokens"),
        (GOOD | {"max_tokens": None}, "'a' has max_tokens = None"),
        (GOOD | {"prompt_ids": []}, "'a' has an empty prompt"),
        (GOOD | {"prompt_ids": [50257]}, "'a' has the token id 50257"),
        (GOOD | {"prompt_ids": [-1]}, "'a' has the token id -1"),
        (GOOD | {"prompt_ids": [1.5]}, "'a' has prompt_ids"),
        (GOOD | {"prompt_ids": [1] * 1023}, "'a' needs 1,025 tokens .* context is 1,024"),
        (GOOD | {"prompt": "x"}, "'a' needs either"),
        ({"id": "a", "max_tokens": 2}, "'a' needs either"),
        ({"id": "a", "prompt": 5, "max_tokens": 2}, "'a' has a prompt that is not text"),
        (GOOD | {"temperature": -0.7}, "'a' has temperature = -0.7"),
        (GOOD | {"temperature": 10**400}, "'a' has temperature = 1000"),
        (GOOD | {"repetition_penalty": 10**400}, "'a' has repetition_penalty = 1000"),
        (GOOD | {"temperature": 1e-40}, "'a' has temperature = 1e-40: .*0 \\(greedy\\), or at least 0.0001"),
        (GOOD | {"repetition_penalty": 5e-324}, "'a' has repetition_penalty = 5e-324"),
        (GOOD | {"temperature": 1e300}, "'a' has temperature = 1e\\+300"),
        (GOOD | {"arrival_s": 1.7e9}, r"'a' has arrival_s = 1700000000\.0: .* from 0 to 2,592,000"),
        (GOOD | {"arrival_s": 10**400}, "'a' has arrival_s = 1000"),
        (GOOD | {"temperature": float("inf")}, "line 1 is not valid JSON: Infinity"),
        (GOOD | {"top_k": 2.5}, "'a' has top_k = 2.5"),
        (GOOD | {"top_p": 0}, "'a' has top_p = 0: it must be a number above 0 and at most 1"),
        (GOOD | {"repetition_penalty": "1"}, "'a' has repetition_penalty = '1'"),
        (GOOD | {"seed": 2**63}, "'a' has seed = 9223372036854775808"),
        (GOOD | {"top_q": 1}, "'a' has the unknown key 'top_q'"),
        (GOOD | {"arrival_s": -1}, "'a' has arrival_s = -1"),
        (GOOD | {"ignore_eos": "no"}, "'a' has ignore_eos"),
        (GOOD | {"frequency_penalty": -2.1}, "'a' has frequency_penalty = -2.1: it must be a number from -2 to 2"),
        (GOOD | {"presence_penalty": True}, "'a' has presence_penalty = True"),
        (GOOD | {"min_p": 1.5}, "'a' has min_p = 1.5"),
        (GOOD | {"grammar": {"type": "object"}}, "'a' has a grammar that is not text"),
        (GOOD | {"prompt_logprobs": 1}, "'a' has prompt_logprobs = 1: it must be true or false"),
        (GOOD | {"logprobs": True}, "'a' has logprobs = True: it must be a whole number from 0 to 20"),
        (GOOD | {"min_tokens": 3}, "'a' has min_tokens = 3: it must be at most max_tokens"),
        (GOOD | {"logit_bias": [[5, 1]]}, "'a' has a logit_bias that is not token ids with numbers"),
        (GOOD | {"logit_bias": {"x": 1}}, "'a' has a logit_bias that is not token ids with numbers"),
        (GOOD | {"logit_bias": {"5": "1"}}, "'a' has a logit_bias that is not token ids with numbers"),
        (GOOD | {"logit_bias": {"5": 10**400}}, "'a' has a logit_bias of 1000"),
        (GOOD | {"logit_bias": {"50257": 1}}, "'a' has the token id 50257 in logit_bias"),
        (GOOD | {"logit_bias": {"5": 1, "05": 2}}, "'a' has two logit_bias values"),
        (GOOD | {"stop_token_ids": [True]}, "'a' has stop_token_ids that are not a list of whole numbers"),
        (GOOD | {"stop_token_ids": [50257]}, "'a' has the token id 50257 in stop_token_ids"),
    ],
)
def test_a_wrong_request_is_named_or_skipped(tmp_path, entry, message):
    source = write(tmp_path / "r.jsonl", entry, GOOD | {"id": "b"})
    with pytest.raises(InputError, match=message):
        read_requests(source, GPT2, encode)
    requests, rejected = read_requests(source, GPT2, encode, skip_invalid=True)
    assert [r.id for r in requests] == ["b"]
    assert [(r.result.id, r.result.finish_reason) for r in rejected] in ([("a", "error")], [("line 1", "error")])


def test_double_ids_are_named(tmp_path):
    source = write(tmp_path / "r.jsonl", GOOD, GOOD)
    with pytest.raises(InputError, match=r"'a' \(line 2\) has the same id as an earlier"):
        read_requests(source, GPT2, None)
    requests, rejected = read_requests(source, GPT2, None, skip_invalid=True)
    assert len(requests) == 1
    assert rejected[0].result.id == "line 2"


def test_text_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"'a' .*no tokenizer\.json"):
        read_requests(write(tmp_path / "r.jsonl", {"id": "a", "prompt": "x", "max_tokens": 1}), GPT2, None)


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_file_without_requests_is_refused(tmp_path, content):
    (tmp_path / "r.jsonl").write_text(content)
    with pytest.raises(InputError, match="has no requests"):
        read_requests(str(tmp_path / "r.jsonl"), GPT2, None)


def test_a_missing_file_is_named():
    with pytest.raises(InputError, match=r"'gone\.jsonl'"):
        read_requests("gone.jsonl", GPT2, None)


def test_a_trace_becomes_requests_of_its_lengths(tmp_path):
    source = write(tmp_path / "t.jsonl", {"input": 3, "output": 4}, {"input": 5, "output": 1})
    assert is_trace(source)
    assert not is_trace(write(tmp_path / "r.jsonl", GOOD))
    requests, _ = read_requests(source, GPT2, None, seed=1)
    assert [(r.id, len(r.prompt_ids), r.max_tokens, r.ignore_eos) for r in requests] == [
        ("0", 3, 4, True),
        ("1", 5, 1, True),
    ]


@pytest.mark.parametrize("names", [("inputTokens", "outputTokens"), ("INPUT", "OUTPUT"), ("Context Tokens", "osl")])
def test_a_trace_in_json_lines_is_one_by_any_spelling_of_its_columns(tmp_path, names):
    source = write(tmp_path / "t.jsonl", dict(zip(names, (3, 2), strict=True)))
    (request,), _ = read_requests(source, GPT2, None)
    assert is_trace(source) and (len(request.prompt_ids), request.max_tokens) == (3, 2)
    assert not is_trace(write(tmp_path / "r.jsonl", {"id": "a", "promptIds": [1]}))


def test_a_traces_unread_columns_are_named(tmp_path):
    source, notes = write(tmp_path / "t.jsonl", {"input": 3, "output": 4, "arrival": 2, "session": 1}), []
    assert read_requests(source, GPT2, None, note=notes.append)[0][0].arrival_s == 0.0
    assert len(notes) == 1 and "are not used: the prompts are drawn at random" in notes[0]
    lone = write(tmp_path / "u.jsonl", {"input": 3, "output": 4, "prefix_id": 1})
    read_requests(lone, GPT2, None, note=notes.append)
    assert len(notes) == 2 and "'prefix_id' is not used without" in notes[1]


def test_a_trace_longer_than_the_context_is_refused_by_id(tmp_path):
    (tmp_path / "t.csv").write_text("input,output\n5,5\n1000,25\n")
    with pytest.raises(InputError, match="Request '1' needs 1,025 tokens"):
        read_requests(str(tmp_path / "t.csv"), GPT2, None)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50), st.floats(0, 9)), max_size=9),
    seed=st.integers(0),
)
def test_random_requests_have_their_lengths_and_are_reproducible(lengths, seed):
    rows = [RequestLengths(*row) for row in lengths]
    requests = random_requests(rows, 100, seed)
    assert requests == random_requests(rows, 100, seed)
    assert [(len(r.prompt_ids), r.max_tokens, r.arrival_s) for r in requests] == lengths
    assert all(0 <= token < 100 for r in requests for token in r.prompt_ids)


def test_no_name_made_up_for_a_skipped_request_is_anothers(tmp_path):
    lines = [GOOD | {"id": "line 2", "max_tokens": 10**6}, "{", GOOD, GOOD, GOOD | {"id": "line 4"}]
    requests, rejected = read_requests(write(tmp_path / "r.jsonl", *lines), GPT2, None, skip_invalid=True)
    assert [request.id for request in requests] == ["a", "line 4"]
    assert [rejection.result.id for rejection in rejected] == ["line 2", "line 2′", "line 4′"]


def test_columns_are_heeded_or_refused(tmp_path):
    rows = [{"en": 3, "de": 2}]
    columns = {"input": "en", "output": "de"}
    (request,), _ = read_requests(write(tmp_path / "t.jsonl", *rows), GPT2, None, columns=columns)
    assert (len(request.prompt_ids), request.max_tokens) == (3, 2)
    (tmp_path / "t.tsv").write_text("en\tde\n3\t2\n")
    assert read_requests(str(tmp_path / "t.tsv"), GPT2, None, columns=columns)[0] == [request]
    with pytest.raises(InputError, match="--columns input=en,output=de names columns of a trace"):
        read_requests(write(tmp_path / "r.jsonl", GOOD), GPT2, None, columns=columns)
