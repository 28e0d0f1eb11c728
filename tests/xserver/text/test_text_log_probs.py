"""Places of tokens in the text of a prompt that is echoed: each is where the token's text stands."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from tests.xserver.text.test_output_text import BYTES, TOKENIZERS, byte_level
from xserver.text.text_log_probs import PromptText, completion_logprobs
from xserver.text.token_bytes import TokenBytes


def placed(prompt: PromptText, token_bytes: TokenBytes, ids):
    """Text and place of each token."""
    logprobs = completion_logprobs(prompt.logprobs(token_bytes, ids, [(None if i == 0 else -1.0, ()) for i in ids]))
    return list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))


def check(text, places):
    """Places are in order, within the text, and at the tokens' texts."""
    offsets = [offset for _, offset in places]
    assert offsets == sorted(offsets) and all(0 <= offset <= len(text) for offset in offsets)
    for token, offset in places:
        assert "\ufffd" in token or text[offset : offset + len(token)] == token, (token, offset, text)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_tokens_of_a_prompt_stand_at_their_places(name, data):
    """Special tokens with their names; ids beyond the tokenizer have no text."""
    most = TOKENIZERS[name].get_vocab_size() + 2
    ids = data.draw(st.lists(st.integers(0, most - 1), min_size=1, max_size=12))
    prompt = PromptText.of(BYTES[name], ids)
    places = placed(prompt, BYTES[name], ids)
    check(prompt.text, places)
    specials = [BYTES[name].special(i) for i in ids]
    assert [token for (token, _), special in zip(places, specials, strict=True) if special] == list(
        filter(None, specials)
    )
    assert all(token == "" for (token, _), i in zip(places, ids, strict=True) if i >= most - 2)
    assert sum(map(len, specials)) <= len(prompt.text)


def test_a_special_token_in_the_midst_has_its_name_in_the_echo():
    tokenizer = TOKENIZERS["byte-level"]
    ids = [*tokenizer.encode("lo").ids, tokenizer.token_to_id("<end>"), *tokenizer.encode(" a木").ids]
    prompt = PromptText.of(BYTES["byte-level"], ids)
    assert prompt.text == "lo<end> a木" == tokenizer.decode(ids, skip_special_tokens=False)
    check(prompt.text, placed(prompt, BYTES["byte-level"], ids))
    assert ("<end>", 2) in placed(prompt, BYTES["byte-level"], ids)


def typed(tokenizer, text):
    encoding = tokenizer.encode(text)
    prompt = PromptText(text, tuple(encoding.offsets))
    return placed(prompt, TokenBytes(tokenizer), encoding.ids)


@pytest.mark.parametrize(
    "text", ["lo a木", "<end>lo", "lo<end> a<end>", "  a  lo ", "\ufffd木 a", "木 <tool>lo", "é🙂"]
)
@pytest.mark.parametrize("trims", [True, False])
def test_tokens_of_a_typed_text_stand_at_their_places(text, trims):
    tokenizer = byte_level()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trims)
    places = typed(tokenizer, text)
    check(text, places)
    starts = {offset for token, offset in places if "\ufffd" not in token}
    assert "<end>" not in text or text.index("<end>") in starts


def test_a_token_that_a_tokenizer_adds_is_placed_without_moving_others():
    tokenizer = byte_level()
    end = tokenizer.token_to_id("<end>")
    tokenizer.post_processor = processors.TemplateProcessing("<end> $A <end>", special_tokens=[("<end>", end)])
    places = typed(tokenizer, "lo a")
    assert places == [("<end>", 0), ("lo", 0), (" a", 2), ("<end>", 4)]


def test_a_normalised_text_keeps_its_places():
    tokenizer = Tokenizer(models.WordLevel({"low": 0, "est": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    assert [offset for _, offset in typed(tokenizer, "LOW   Est")] == [0, 6]


def test_a_first_space_that_the_decoder_drops_is_in_no_token():
    """A prompt of a single space has no text, and its token none."""
    token_bytes = BYTES["unigram with byte fallback"]
    space = 32
    prompt = PromptText.of(token_bytes, [space])
    assert prompt.text == "" and placed(prompt, token_bytes, [space]) == [("", 0)]
