"""Output text: what tokens add to the text of a prompt, as they come."""

from collections.abc import Sequence
from typing import Any

_BEFORE = 6
"""Tokens of the prompt that the output is decoded with: a first token may lose its space when decoded alone."""
_INCOMPLETE = "\ufffd"


class OutputText:
    """The text of one sequence's output: `push` returns what is certain, `finish` the rest."""

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int]):
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids[-_BEFORE:])
        self._begin, self._end = 0, len(self._ids)
        """The window: text up to `_end` has been given, and is decoded again from `_begin` on."""

    def push(self, tokens: Sequence[int]) -> str:
        """Text that these tokens complete."""
        self._ids += tokens
        known, text = self._decode(self._end), self._decode(len(self._ids))
        if len(text) <= len(known) or text.endswith(_INCOMPLETE):
            return ""
        self._begin, self._end = self._end, len(self._ids)
        return text[len(known) :]

    def finish(self) -> str:
        """What was held back, an incomplete character replaced."""
        known, text = self._decode(self._end), self._decode(len(self._ids))
        self._begin = self._end = len(self._ids)
        return text[len(known) :]

    def _decode(self, end: int) -> str:
        text: str = self._tokenizer.decode(self._ids[self._begin : end], skip_special_tokens=True)
        return text
