"""What traces say of their prompts' tokens: as it stands in public traces, and what is refused."""

import json

import pytest

from xcore.errors import InputError
from xcore.traces.prompt_identity import PromptIdentity
from xcore.traces.trace import read_trace


def write_rows(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_mooncakes_blocks_have_512_tokens(tmp_path):
    row = {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}
    (request,) = read_trace(write_rows(tmp_path / "m.jsonl", row))
    assert request.identity == PromptIdentity(block_ids=(7, 8, 9), block_tokens=512)


def test_bailians_blocks_have_16_tokens_and_its_chats_continue_others(tmp_path):
    row = {"chat_id": 4, "parent_chat_id": 2, "timestamp": 1.5, "input_length": 33, "output_length": 5, "turn": 2}
    first = row | {"chat_id": 2, "parent_chat_id": -1, "timestamp": 0.5, "hash_ids": [1, 2, 3]}
    requests = read_trace(write_rows(tmp_path / "b.jsonl", first, row | {"hash_ids": [1, 2, 3]}))
    known = {"block_ids": (1, 2, 3), "block_tokens": 16}
    assert [r.identity for r in requests] == [
        PromptIdentity(chat="2", **known),
        PromptIdentity(chat="4", parent_chat="2", **known),
    ]


def test_identities_of_csv_columns(tmp_path):
    (tmp_path / "t.csv").write_text(
        "input,output,prefix_id,prefix_tokens,Session ID\n9,2,a,4,s\n9,2,,,s\n9,2,,,\n9,0,a,1,s\n"
    )
    assert [r.identity for r in read_trace(tmp_path / "t.csv")] == [
        PromptIdentity(prefix="a", prefix_tokens=4, conversation="s"),
        PromptIdentity(conversation="s"),
        None,
    ]


def test_identities_by_other_names_of_columns(tmp_path):
    (tmp_path / "t.csv").write_text('input,output,who,ids\n3,2,s,"[1, 2, 3]"\n')
    asked = {"conversation_id": "who", "prompt_ids": "ids"}
    (request,) = read_trace(tmp_path / "t.csv", asked)
    assert request.identity == PromptIdentity(token_ids=(1, 2, 3), conversation="s")
    with pytest.raises(InputError, match="has no hash_ids column 'blocks', only 'input'"):
        read_trace(tmp_path / "t.csv", {"hash_ids": "blocks"})


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"prompt_ids": [1, 2]}, "row 1, column 'prompt_ids': it has 2 tokens, but the row's input has 40"),
        ({"prompt_ids": [1.5] * 40}, "are not tokens: they must be whole numbers"),
        ({"prompt_ids": 7}, "7 is not a list: write a list"),
        ({"hash_ids": [None]}, "are not names of blocks"),
        ({"prefix_id": "a", "prefix_tokens": -1}, "column 'prefix_tokens': -1 is not a number of tokens"),
        ({"prefix_id": "a", "prefix_tokens": "many"}, "'many' is not a number of tokens"),
    ],
)
def test_identities_that_are_none_are_refused_by_row_and_column(tmp_path, more, said):
    with pytest.raises(InputError, match=said):
        read_trace(write_rows(tmp_path / "t.jsonl", {"input": 40, "output": 3} | more))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"hash_ids": [1, 2, 3, 4]}, "in 1 of 2 rows the number of hash_ids differs from the prompt's blocks of 512"),
        ({"hash_ids": [1], "chat_id": 3}, "blocks of 16 tokens, as in Qwen-Bailian's traces, which have a chat_id"),
        ({"hash_ids": [1, 2]}, None),
    ],
)
def test_names_that_are_not_one_for_each_block_are_noted(tmp_path, more, said):
    rows = ({"input": 40, "output": 3} | more, {"input": 30, "output": 3} | more | {"hash_ids": [1, 2]})
    notes = []
    read_trace(write_rows(tmp_path / "t.jsonl", *rows), note=notes.append)
    assert [said in text for text in notes if "hash_ids" in text] == ([True] if said else [])
