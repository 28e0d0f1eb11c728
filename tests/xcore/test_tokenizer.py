"""Tokenizers as they are read from tokenizer.json: every text keeps its tokens, and what isn't one is named."""

import ast
import json
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import exegpt
from exegpt.loadtest.request_prompts import tokenizer_of
from tests.exegpt.cli.conftest import run_command
from xcore.errors import InputError
from xcore.requests.request_lists import read_for_model
from xcore.specs.model import ModelSpec
from xcore.tokenizer import encode, load_tokenizer
from xserver.http.api_error import ApiError
from xserver.http.served_model import ServedModel

PROMPT = "x" * 60
CUT = {"truncation": {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0}}
STRIDE = {"truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 9}}
FILLED = {
    "padding": {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 256,
        "pad_type_id": 0,
        "pad_token": "<|end|>",
    }
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    sizes = "--arch llama --layers 1 --hidden 32 --heads 2 --kv-heads 2 --ffn 32 --vocab 300 --context 128"
    assert run_command("model", "create", directory, *sizes.split()).code == 0
    return directory


@pytest.fixture(params=[{}, CUT, STRIDE, FILLED, CUT | FILLED], ids=["plain", "cut", "stride", "filled", "both"])
def changed(request, model, tmp_path) -> Path:
    """The model with a tokenizer.json that asks for lengths."""
    return with_tokenizer(model, tmp_path, request.param)


def with_tokenizer(model, directory, changes, text=None):
    """The model's directory with these keys in its tokenizer.json, or with this text instead of it."""
    for file in model.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    document = json.loads((model / "tokenizer.json").read_text()) | changes
    (directory / "tokenizer.json").write_text(json.dumps(document) if text is None else text)
    return directory


def test_lengths_in_the_tokenizers_file_change_no_prompt(changed):
    tokenizer = load_tokenizer(changed)
    assert len(encode(tokenizer, PROMPT)) == 60 and len(encode(tokenizer, "abc")) == 3
    assert encode(tokenizer_of(changed), "abc") == encode(tokenizer, "abc")


def test_requests_and_the_server_count_a_prompts_own_tokens(changed, tmp_path):
    lines = [json.dumps({"id": text, "prompt": text, "max_tokens": 2}) for text in (PROMPT, "abc")]
    (tmp_path / "r.jsonl").write_text("\n".join(lines))
    requests, _ = read_for_model(str(tmp_path / "r.jsonl"), changed, ModelSpec.from_directory(changed), None, 0, print)
    assert [len(request.prompt_ids) for request in requests] == [60, 3]
    served = ServedModel.read(changed, None)
    assert len(served.encode(PROMPT)) == 60 and len(served.encode("abc", special=False)) == 3


TOOL = {"content": "<tool>", "lstrip": True, "special": False}


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"300": TOOL, "256": {"content": "<|endoftext|>"}}}),
        ("tokenizer_config.json", {"additional_special_tokens": ["<tool>"]}),
        ("tokenizer_config.json", {"extra_special_tokens": {"tool_token": "<tool>"}}),
        ("tokenizer_config.json", {"pad_token": {"__type": "AddedToken", "content": "<tool>", "rstrip": True}}),
        ("added_tokens.json", {"<tool>": 300}),
    ],
)
def test_tokens_that_files_beside_the_tokenizer_add_are_those_of_transformers(model, tmp_path, file, values):
    transformers = pytest.importorskip("transformers")
    directory = with_tokenizer(model, tmp_path, {})
    path = directory / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | values))
    for text in ("a  <tool>  b", "<tool>", "tool<|endoftext|>"):
        ids = encode(load_tokenizer(directory), text)
        assert ids == transformers.AutoTokenizer.from_pretrained(directory)(text)["input_ids"]
        assert (300 in ids) == ("<tool>" in text)


@pytest.mark.parametrize("values", [[], {"added_tokens_decoder": {"x": {}}}, {"added_tokens_decoder": {"300": {}}}])
def test_added_tokens_of_another_form_are_refused_by_file(model, tmp_path, values):
    directory = with_tokenizer(model, tmp_path, {})
    (directory / "tokenizer_config.json").write_text(json.dumps(values))
    with pytest.raises(InputError, match=r"the added tokens in '.*tokenizer_config\.json' or"):
        load_tokenizer(directory)


def test_only_one_function_reads_tokenizers():
    root = Path(exegpt.__file__).parent.parent
    files = [
        file
        for package in "exegpt xcore xmulti xserver xrunner xprofiler kernels".split()
        for file in (root / package).rglob("*.py")
    ]
    reading = {
        file.relative_to(root).as_posix()
        for file in files
        if "Tokenizer" in (text := file.read_text())  # to parse all files takes longer
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute)
        and node.attr in ("from_file", "from_str", "from_pretrained", "from_buffer")
        and isinstance(node.value, ast.Name)
        and "Tokenizer" in node.value.id
    }
    assert reading == {"xcore/tokenizer.py"}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, '{"a'),
        ({}, ""),
        ({}, "[]"),
        ({}, "[" * 100_000),
        ({"version": "9.9"}, None),
        ({"model": {"type": "Nothing"}}, None),
        ({"model": {"type": "Unigram", "unk_id": 99, "vocab": [["a", -1.0]]}}, None),
        (
            {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": False}},
            None,
        ),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, None),  # the library panics
    ],
)
def test_what_is_no_tokenizer_is_named(model, tmp_path, changes, text):
    directory = with_tokenizer(model, tmp_path, changes, text)
    with pytest.raises(InputError, match=r"tokenizer\.json' is not a tokenizer: [^\n]*\.$"):
        load_tokenizer(directory)


def test_a_text_without_tokens_is_refused_by_its_request(model, tmp_path):
    words = {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}}
    directory = with_tokenizer(model, tmp_path, words | {"pre_tokenizer": None, "decoder": None})
    (tmp_path / "r.jsonl").write_text('{"id": "q", "prompt": "zz", "max_tokens": 2}\n')
    spec = ModelSpec.from_directory(directory)
    with pytest.raises(InputError, match="Request 'q' has a text prompt, and the tokenizer can't encode the text"):
        read_for_model(str(tmp_path / "r.jsonl"), directory, spec, None, 0, print)
    with pytest.raises(ApiError) as error:
        ServedModel.read(directory, None).encode("zz")
    assert error.value.status == 400


def test_what_the_library_raises_for_a_text_is_an_input_error(model):
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    with pytest.raises(InputError, match="can't encode the text"):
        encode(tokenizer, "half of a pair: \ud800")


def test_a_tokenizer_that_is_no_file_counts_as_none(tmp_path):
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").mkdir()
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").rmdir()
    os.mkfifo(tmp_path / "tokenizer.json")
    assert load_tokenizer(tmp_path) is None


def test_a_panic_of_the_library_is_one_sentence(model, tmp_path, capfd):
    """A merge of tokens outside of the vocabulary; Rust prints its panics on standard error by itself."""
    document = json.loads((model / "tokenizer.json").read_text())
    document["model"]["merges"] = [["a", "b"]]
    document["model"]["vocab"] |= {"ab": 300}
    document["model"]["continuing_subword_prefix"] = "####"
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match="is not a tokenizer: "):
        load_tokenizer(tmp_path)
    assert capfd.readouterr().err == ""


def test_what_others_print_while_a_tokenizer_is_read_is_kept(model, monkeypatch, capfd):
    real = Tokenizer.from_file

    def loud(path):
        os.write(2, b"a word\n")
        return real(path)

    monkeypatch.setattr("tokenizers.Tokenizer", type("Loud", (), {"from_file": staticmethod(loud)}))
    load_tokenizer(model)
    assert capfd.readouterr().err == "a word\n"
