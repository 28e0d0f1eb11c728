"""Created models: the tokenizer of `exegpt model create`."""

import pytest

from tests.exegpt.cli.conftest import run_command
from xcore.tokenizer import load_tokenizer
from xrunner.models.generated_merges import generated_merges

TEXT = "The answer of the people: there are 2 others, häßlich 🙂 and 日本.\n\n\t  End\x00"


@pytest.mark.parametrize("vocab", [257, 300, 32_000])
def test_every_token_of_a_created_model_has_a_text(tmp_path, vocab):
    sizes = "--layers 1 --hidden 4 --heads 1 --ffn 4 --context 64"
    assert run_command("model", "create", tmp_path / "m", *sizes.split(), "--vocab", vocab).code == 0
    tokenizer = load_tokenizer(tmp_path / "m")
    assert tokenizer.get_vocab_size() == vocab
    assert [i for i in range(vocab) if not tokenizer.decode([i])] == [256]  # the end of a text is special
    assert tokenizer.decode([256], skip_special_tokens=False) == "<|endoftext|>"
    assert tokenizer.decode(tokenizer.encode(TEXT).ids) == TEXT


def test_created_tokenizers_have_words_as_tokens(tmp_path):
    sizes = "--layers 1 --hidden 4 --heads 1 --ffn 4 --context 64 --vocab 1000"
    assert run_command("model", "create", tmp_path / "m", *sizes.split()).code == 0
    text = "you will find many people there"
    assert load_tokenizer(tmp_path / "m").encode(text).tokens == [text[:3], *(f"Ġ{word}" for word in text.split()[1:])]


def test_generated_merges_join_earlier_tokens_to_new_ones():
    tokens = {chr(letter) for letter in range(ord("a"), ord("z") + 1)} | {"Ġ"}
    merges = generated_merges(5000)
    for left, right in merges:
        assert {left, right} <= tokens and left + right not in tokens
        tokens.add(left + right)
    assert generated_merges(100) == merges[:100]
