"""Prompts of given lengths: random token ids, or texts with a given number of tokens."""

import string
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from xcore.errors import InputError
from xcore.tokenizer import encode, load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


VOCAB = 256
"""Every vocabulary has ids below this, and a byte-level tokenizer has no others."""
WORDS = (
    "the of and to in is that it for was on are with as be at this have from or by one had not but what all were when "
    "we there can an your which their said if do will each about how up out them then she many some so these would "
    "other into has more her two like him see time could no make than first been its who now people my made over did "
    "down only way find use may water long little very after words called just where most know"
).split()
"""Words that are one token each, together with the preceding space, in the vocabularies of GPT-2, Llama and successors.
"""
_TRIES = 20
_SPACES = ("Ġ", "▁")
"""The characters for the space before a word in byte-level and SentencePiece vocabularies."""

Prompt = tuple[list[int] | str, int]
"""Ids or a text, and the number of tokens, as far as it is known."""


def id_prompts(lengths: Sequence[int], vocab: int, seed: Sequence[int]) -> list[Prompt]:
    """Return prompts of these lengths, with random ids below `vocab`."""
    rng = np.random.default_rng(seed)
    return [(rng.integers(0, vocab, size=length).tolist(), length) for length in lengths]


def text_prompts(lengths: Sequence[int], tokenizer: "Tokenizer | None", seed: Sequence[int]) -> list[Prompt]:
    """Return texts of these lengths, counted by a tokenizer (`tokenizers.Tokenizer`).

    The count includes the special tokens that the tokenizer adds. Without a tokenizer, a word counts as a token.
    """
    rng = np.random.default_rng(seed)
    if tokenizer is None:
        return [(" ".join(rng.choice(WORDS, size=length)), length) for length in lengths]
    words = single_tokens(tokenizer)
    return [_text(length, words, tokenizer, rng) for length in lengths]


def _text(length: int, words: Sequence[str], tokenizer: "Tokenizer", rng: np.random.Generator) -> Prompt:
    """Return a text with `length` tokens, or as close to it as the tokenizer allows."""
    drawn = list(rng.choice(words, size=length))
    best: Prompt | None = None
    for _ in range(_TRIES):
        text = "".join(drawn)
        tokens = len(encode(tokenizer, text))
        if best is None or abs(tokens - length) < abs(best[1] - length):
            best = text, tokens
        if tokens == length:
            break
        if tokens > length:
            del drawn[max(1, len(drawn) - (tokens - length)) :]
        else:
            drawn += list(rng.choice(words, size=length - tokens))
    assert best is not None
    return best


def single_tokens(tokenizer: "Tokenizer", most: int = 2000) -> list[str]:
    """Return pieces of text that are one token each: words with a preceding space, otherwise letters."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    words = [name[1:] for name, _ in vocabulary if name[:1] in _SPACES and name[1:].isascii() and name[1:].isalpha()]
    return [f" {word}" for word in words[:most]] or list(string.ascii_lowercase)


def tokenizer_of(directory: Path | None) -> "Tokenizer | None":
    """Return the tokenizer in a directory; None without a directory; InputError if the directory has none."""
    if directory is None:
        return None
    tokenizer = load_tokenizer(directory)
    if tokenizer is None:
        raise InputError(f"'{directory}' has no tokenizer.json: name the directory of the model's tokenizer.")
    return tokenizer
