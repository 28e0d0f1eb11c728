"""What other libraries raise for a file becomes one sentence: CSV sources of profiles, YAML, weights, configs."""

import json
import os
import re
import struct

import pytest

from xcore.document import read_yaml
from xcore.errors import InputError, refusing
from xcore.rows import csv_rows, reading_parquet
from xrunner.models import load_model
from xrunner.models.create import create_model
from xserver.http.served_model import ServedModel

SIZES = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 2, "ffn": 32, "vocab": 300, "context": 128}


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "tiny"
    create_model(directory, arch="llama", dtype="fp32", seed=0, shards=1, **SIZES)
    return directory


def one_sentence(error):
    text = str(error.value)
    assert text.endswith(".") and "\n" not in text and "Traceback" not in text
    return text


def safetensors(header, body=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 5,
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2**40) + b"{}",
        safetensors(b'{"a'),
        safetensors(b"[" * 100_000),
        safetensors(b'{"\xff": 1}'),
        safetensors({"a": {"dtype": "NOPE", "shape": [1], "data_offsets": [0, 4]}}, b"0000"),
        safetensors({"a": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 4]}}, b"0000"),
        safetensors({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 2**50]}}, b"0000"),
        safetensors({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, b"0000"),
    ],
)
def test_torn_weights_are_named(model, content):
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=r"model\.safetensors' is not a whole safetensors file") as error:
        load_model(model)
    one_sentence(error)


def test_weights_that_are_cut_anywhere_are_named(model):
    whole = (model / "model.safetensors").read_bytes()
    for place in range(1, len(whole), len(whole) // 20):
        (model / "model.safetensors").write_bytes(whole[:place])
        with pytest.raises(InputError, match="is not a whole safetensors file"):
            load_model(model)


def test_weights_that_are_no_file_are_named(model):
    for make in (os.mkdir, os.mkfifo):
        (model / "model.safetensors").unlink(missing_ok=True)
        make(model / "model.safetensors")
        with pytest.raises(InputError, match=r"is a folder|is a pipe or a device"):
            load_model(model)
        if make is os.mkdir:
            os.rmdir(model / "model.safetensors")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("generation_config.json", "{"),
        ("generation_config.json", "[" * 100_000),
        ("generation_config.json", "[]"),
        ("generation_config.json", '{"eos_token_id": "end"}'),
        ("generation_config.json", '{"eos_token_id": [1, null]}'),
        ("tokenizer_config.json", "["),
        ("tokenizer_config.json", "[" * 100_000),
        ("special_tokens_map.json", "[]"),
    ],
)
def test_wrong_documents_of_a_served_model_are_named(model, file, text):
    (model / file).write_text(text)
    with pytest.raises(InputError, match=re.escape(file)) as error:
        _ = ServedModel.read(model, None).eos
    one_sentence(error)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a,b\n1,x\n", "row 2, column 'b': 'x' must be a number"),
        ("a,b\n1,nan\n", "row 2, column 'b': 'nan' must be a number"),
        ("a,b\n1\n", "row 2 has no value in column 'b'"),
        ("a,b\n1,2.5\n", "row 2, column 'b': 2.5 must be a whole number"),
        ("a,c\n1,2\n", "has no column 'b'"),
        ("a,b\n", "has no rows"),
        ("", "has no column 'a', 'b'"),
        ('a,b\n1,"2\n', "row 2: it is not CSV"),
        ("a,b\n1," + "9" * 5000 + "\n", "must be a number"),
    ],
)
def test_wrong_figures_in_csv_files_are_named(tmp_path, text, sentence):
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=re.escape(sentence)) as error:
        [row.whole("b") for row in csv_rows(path, "a", "b")]
    one_sentence(error)


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)
)


@pytest.mark.parametrize(
    "text",
    [
        "a:\n\t- x\n",
        "? [a, b]\n: 3\n",
        "a: !!python/object/apply:os.system [id]\n",
        "a: !!timestamp x\n",
        "a: !!int ''\n",
        "a: !!float ''\n",
        "a: 2024-13-45\n",
        "a: 0b_\n",
        "a: " + "9" * 5000,
        "[" * 5000,
        "a: 1\n---\nb: 2\n",
        'a: "\\ud800"\n',
        'a: "\\U0000d800"\n',
        "a: \0\n",
    ],
)
def test_what_is_no_yaml_is_named(tmp_path, text):
    path = tmp_path / "t.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=r"t\.yaml'") as error:
        read_yaml(path, "models")
    one_sentence(error)


def test_aliases_of_aliases_take_no_memory(tmp_path):
    path = tmp_path / "t.yaml"
    path.write_text(BOMB)
    assert len(read_yaml(path, "models")) == 10


def test_what_is_no_error_of_a_library_passes():
    with pytest.raises(KeyboardInterrupt), refusing("this"):
        raise KeyboardInterrupt
    with pytest.raises(InputError, match=r"^its own$"), refusing("this"):
        raise InputError("its own")
    with pytest.raises(InputError, match=r"^this: first line\.$"), refusing("this"):
        raise ValueError("first line.\nsecond")


def test_parquet_tables_of_a_source_are_named(tmp_path):
    path = tmp_path / "t.parquet"
    path.write_bytes(b"PAR1")
    from pyarrow import parquet

    with pytest.raises(InputError, match=r"t\.parquet' is not a readable Parquet file"), reading_parquet(path):
        parquet.read_table(path)
