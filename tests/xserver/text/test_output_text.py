"""Output text is prompt and output decoded together, less the prompt, for any ids and however they come."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from xserver.text.output_text import OutputText
from xserver.text.token_bytes import TokenBytes

WORDS = ["the", "new", "est", "é", "木", "🙂", "low", ".", "?", "'s", "do", "n't"]
_END = [AddedToken("<end>", special=True)]


def byte_level(decoder=None) -> Tokenizer:
    """Every byte, two longer tokens, one that is cut inside a character, a special and an ordinary added token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "a"), ("l", "o"), ("æ", "ľ")]
    vocab = {token: i for i, token in enumerate([*letters, *("".join(merge) for merge in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoder or decoders.ByteLevel()
    tokenizer.add_special_tokens(_END)
    tokenizer.add_tokens(["木 <tool>"])
    return tokenizer


def byte_fallback(strip: bool = True, model=models.BPE) -> Tokenizer:
    """As SentencePiece's: words with their space, and a token for each byte."""
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", *("▁" + word for word in WORDS), *WORDS, "<0xZZ>"]
    vocab = {token: i for i, token in enumerate(tokens)}
    if model is models.Unigram:
        tokenizer = Tokenizer(models.Unigram([(token, -1.0) for token in vocab], unk_id=0, byte_fallback=True))
    else:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strip else [])])
    tokenizer.add_special_tokens(_END)
    return tokenizer


def word_piece() -> Tokenizer:
    vocab = {token: i for i, token in enumerate(["[UNK]", *WORDS, *("##" + word for word in WORDS)])}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(_END)
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(
        models.Unigram([(token, -1.0) for token in ["▁", *WORDS, *("▁" + w for w in WORDS)]], unk_id=0)
    )
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(_END)
    return tokenizer


def suffixed() -> Tokenizer:
    vocab = {token: i for i, token in enumerate([*WORDS, *(word + "</w>" for word in WORDS)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    return tokenizer


def plain() -> Tokenizer:
    return Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="the"))


TOKENIZERS = {
    "byte-level": byte_level(),
    "byte-level in a sequence": byte_level(decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])),
    "byte fallback": byte_fallback(),
    "byte fallback without strip": byte_fallback(strip=False),
    "unigram with byte fallback": byte_fallback(model=models.Unigram),
    "word pieces": word_piece(),
    "unigram": unigram(),
    "suffixes": suffixed(),
    "no decoder": plain(),
}
BYTES = {name: TokenBytes(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def streamed(token_bytes: TokenBytes, prompt, pieces) -> str:
    text = OutputText(token_bytes, prompt)
    return "".join(text.push(piece) for piece in pieces) + text.finish()


@st.composite
def sequences(draw, name: str, least: int = 0):
    """Ids up to some beyond the tokenizer; half of them of characters, so that bytes are often valid."""
    tokenizer = TOKENIZERS[name]
    some = st.integers(0, tokenizer.get_vocab_size() + 3).map(lambda i: [i])
    written = st.sampled_from(["木", "🙂", "é", " ", "a"]).map(lambda text: _ids(name, text))
    return [i for ids in draw(st.lists(some | written, min_size=least, max_size=12)) for i in ids]


def _ids(name: str, text: str) -> list[int]:
    """A text in single bytes, where the tokenizer has them."""
    tokenizer = TOKENIZERS[name]
    if BYTES[name].byte_level:
        return tokenizer.encode(text, add_special_tokens=False).ids
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    return [i for i in ids if i is not None] or [0]


def cut(ids, places):
    ends = sorted({min(place, len(ids)) for place in places} | {0, len(ids)})
    return [ids[begin:end] for begin, end in pairwise(ends)]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pieces_together_are_the_whole(name, data):
    prompt, ids = data.draw(sequences(name)), data.draw(sequences(name))
    pieces = cut(ids, data.draw(st.lists(st.integers(0, 20), max_size=6)))
    assert streamed(BYTES[name], prompt, pieces) == streamed(BYTES[name], prompt, [ids])
    assert streamed(BYTES[name], prompt, [[i] for i in ids]) == streamed(BYTES[name], prompt, [ids])


def expected(name: str, prompt, ids) -> str:
    """The tokenizer's text of both, less what it begins with of the prompt's."""
    tokenizer = TOKENIZERS[name]
    known, text = tokenizer.decode(prompt), tokenizer.decode(prompt + ids)
    same = next((i for i in range(len(known)) if text[i : i + 1] != known[i]), len(known))
    return text[same:]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_text_is_both_decoded_less_the_prompt(name, data):
    prompt, ids = data.draw(sequences(name)), data.draw(sequences(name))
    if "fallback" in name and any("\ufffd" in TOKENIZERS[name].decode(known) for known in (prompt, prompt + ids)):
        return  # the library gives up valid characters beside invalid bytes, and those of a character that is cut
    assert streamed(BYTES[name], prompt, [[i] for i in ids]) == expected(name, prompt, ids)


def test_a_character_that_the_prompt_cuts_is_completed_alone():
    """The library's text of 0x00 0xC2 has two U+FFFD: the valid character before the cut one is not repeated."""
    assert streamed(BYTES["byte fallback without strip"], [0, 0xC2], [[0x80]]) == "\x80"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_byte_fallback_replaces_only_bytes_that_are_no_utf8(data):
    ids = data.draw(st.lists(st.integers(0, 255), min_size=1, max_size=12))
    whole = bytes(ids).decode("utf-8", "replace-bytes")
    assert streamed(BYTES["byte fallback without strip"], [300], [[i] for i in ids]) == whole


@pytest.mark.parametrize("name", ["byte-level", "byte fallback"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_at_most_three_bytes_are_held_back(name, data):
    prompt, ids = data.draw(sequences(name, 1)), data.draw(sequences(name, 1))
    text = OutputText(BYTES[name], prompt)
    given_text = text.push(ids)
    later = text.finish()
    assert len(later) <= (1 if name == "byte-level" else 3) and set(later) <= {"\ufffd"}
    assert given_text + later == streamed(BYTES[name], prompt, [ids])


@pytest.mark.parametrize(
    ("name", "prompt", "output", "text"),
    [
        ("byte-level", "木".encode()[:2], "木".encode()[2:] + b"a", "木a"),
        ("byte-level", "木".encode()[:2], b"a", "a"),
        ("byte-level", "木".encode()[:1], b"\xff", "\ufffd"),
        ("byte-level", b"a", "🙂".encode()[:3], "\ufffd"),
        ("byte fallback", "木".encode()[:2], "木".encode()[2:] + b"a", "木a"),
        ("byte fallback", "木".encode()[:2], b"a", "a"),
        ("byte fallback", b"", b" a", "a"),
        ("byte fallback", b"a", b" a", " a"),
        ("byte fallback", b"a", "🙂".encode()[:3], "\ufffd" * 3),
    ],
)
def test_prompts_and_outputs_may_end_inside_a_character(name, prompt, output, text):
    ids = {bytes([byte]): i for i in range(256) for byte in BYTES[name].get(i) or b""}
    prompt_ids, output_ids = ([ids[bytes([byte])] for byte in data] for data in (prompt, output))
    assert streamed(BYTES[name], prompt_ids, [[i] for i in output_ids]) == text


def test_a_first_token_keeps_its_space_behind_a_prompt():
    tokenizer = TOKENIZERS["byte fallback"]
    word = tokenizer.token_to_id("▁low")
    assert streamed(BYTES["byte fallback"], [word], [[word], [word]]) == " low low"
    assert streamed(BYTES["byte fallback"], [tokenizer.token_to_id("<end>")], [[word], [word]]) == "low low"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_token_costs_the_same_however_long_the_output(name, monkeypatch):
    decoded = []
    own = BYTES[name]
    monkeypatch.setattr(own, "decode", lambda ids: decoded.append(len(ids)) or TokenBytes.decode(own, ids))
    streamed(own, list(range(10)) * 50, [[i % 13] for i in range(500)])
    assert sum(decoded) <= 500 * 10
