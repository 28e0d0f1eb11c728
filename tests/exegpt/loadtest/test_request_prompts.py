"""Prompts have the lengths that were drawn."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from exegpt.loadtest.request_prompts import WORDS, id_prompts, text_prompts, tokenizer_of
from xcore.errors import InputError
from xcore.requests.request_lists import load_tokenizer
from xrunner.models.create import create_model

LENGTHS = [1, 2, 17, 300]


def test_ids_are_of_the_vocabulary_and_differ_by_seed():
    prompts = id_prompts(LENGTHS, 50, (1,))
    assert [len(ids) for ids, _ in prompts] == [tokens for _, tokens in prompts] == LENGTHS
    assert {i for ids, _ in prompts for i in ids} == set(range(50))
    assert prompts == id_prompts(LENGTHS, 50, (1,)) != id_prompts(LENGTHS, 50, (2,))


def test_without_a_tokenizer_a_word_is_a_token():
    prompts = text_prompts(LENGTHS, None, (1,))
    assert [len(text.split()) for text, _ in prompts] == LENGTHS
    assert {word for text, _ in prompts for word in text.split()} <= set(WORDS)


def words_tokenizer():
    """One that has a token for each word with its space, and adds a token at the beginning, as Llama's does."""
    vocabulary = {"<s>": 0, **{f"Ġ{word}": i for i, word in enumerate(WORDS, 1)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def test_texts_have_exactly_the_tokens_that_the_tokenizer_counts(tmp_path):
    create_model(tmp_path / "m", "llama", layers=1, hidden=16, heads=1, kv_heads=1, ffn=16, vocab=300, context=64)
    for tokenizer, lengths in ((load_tokenizer(tmp_path / "m"), LENGTHS), (words_tokenizer(), [2, 3, 40])):
        prompts = text_prompts(lengths, tokenizer, (1,))
        assert [len(tokenizer.encode(text).ids) for text, _ in prompts] == lengths
        assert [tokens for _, tokens in prompts] == lengths
    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        tokenizer_of(tmp_path)
