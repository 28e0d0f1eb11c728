"""Output text: the text that new tokens add to the text of a prompt."""

import codecs
from collections.abc import Container, Sequence
from itertools import groupby

from xserver.text.token_bytes import TokenBytes

_CONTEXT = 4
"""Number of preceding tokens with which others are decoded: a first token may lose its space when decoded alone.

Each token has at least one byte, and a character at most four.
"""


def _replace_bytes(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("replace-bytes", _replace_bytes)


class OutputText:
    """The text of one sequence's output: the text of prompt and output, minus the prompt's text.

    `push` returns the text that is certain, `finish` the rest: at most three bytes of an incomplete character.

    If the output completes a character in which the prompt ends, that character follows the prompt. Bytes that aren't
    UTF-8 become U+FFFD as in tokenizers: once for a cut character of byte-level ones, once per byte with byte fallback.
    With byte fallback, the tokenizers library also replaces valid characters next to such bytes. Here they stay,
    because they may have been sent already.

    Special tokens have no text, except for those in `named`, whose text is their names.
    """

    def __init__(self, token_bytes: TokenBytes, prompt_ids: Sequence[int], named: Container[int] = ()):
        self._bytes, self._named = token_bytes, named
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace" if token_bytes.byte_level else "replace-bytes")
        self._before, ending = self._end_of(prompt_ids)
        self._utf8.decode(ending)
        cut = self._utf8.getstate()[0]
        self._shown = cut.decode("utf-8", self._utf8.errors)
        """The replacement in the prompt's text for the incomplete character at its end."""
        self._strips = token_bytes.strips_space and not self._before

    def push(self, tokens: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        text = ""
        for kind, group in groupby(tokens, self._kind):
            run = list(group)
            if kind == "special":
                names = "".join(self._bytes.special(token) for token in run if token in self._named)
                text += self.finish() + names if names else ""
                continue
            for part in [[token] for token in run] if kind == "text" else [run]:  # the same text however they arrive
                text += self.finish() + self._in_context(part) if kind == "text" else self._decode(part)
                self._before = (self._before + part[-_CONTEXT:])[-_CONTEXT:]
        return text

    def finish(self) -> str:
        """Return the text that was held back; an incomplete character is replaced."""
        return self._less_shown(self._utf8.decode(b"", final=True))

    def shown(self, token: int) -> bytes:
        """Return the text that a token would have next, in UTF-8 or a part of it; for a special token, its name."""
        data = self._bytes.get(token)
        if data is None:
            return self._behind([token]).encode()
        if data and self._strips and not self._utf8.getstate()[0]:
            return data.removeprefix(b" ")  # the decoder drops a text's first space
        return data or (self._bytes.tokenizer.id_to_token(token) or "").encode()

    def _kind(self, token: int) -> str:
        data = self._bytes.get(token)
        return "text" if data is None else "bytes" if data else "special"

    def _end_of(self, prompt_ids: Sequence[int]) -> tuple[list[int], bytes]:
        """Return the prompt's last tokens with text, and the bytes of the byte tokens at its end."""
        before: list[int] = []
        ending, are_bytes = b"", True
        for token in reversed(prompt_ids):
            data = self._bytes.get(token)
            if data == b"":
                continue
            before.insert(0, token)
            are_bytes = are_bytes and data is not None
            if are_bytes and data:
                ending = data + ending
            if len(before) == _CONTEXT:
                break
        return before, ending

    def _decode(self, run: list[int]) -> str:
        text = self._less_shown(self._utf8.decode(b"".join(self._bytes.get(token) or b"" for token in run)))
        if text and self._strips:
            self._strips = False
            return text.removeprefix(" ")
        return text

    def _in_context(self, run: list[int]) -> str:
        self._strips = False  # the decoder does
        return self._behind(run)

    def _behind(self, run: list[int]) -> str:
        known = self._bytes.decode(self._before)
        return self._bytes.decode(self._before + run)[len(known) :]

    def _less_shown(self, text: str) -> str:
        if not text:
            return text
        shown, self._shown = self._shown, ""
        while shown and not text.startswith(shown):
            shown = shown[:-1]
        return text[len(shown) :]
