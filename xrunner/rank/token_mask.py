"""Token masks: the tokens of the vocabulary that are allowed, one bit each, as in `LogitEdits.allowed`."""

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from xcore.arrays import Integers32


class TokenConstraint(Protocol):
    """A rule that a sequence's output must follow, advanced by the tokens so far."""

    @property
    def complete(self) -> bool:
        """Return whether no token can follow."""

    @property
    def failed(self) -> bool:
        """Return whether the rule can't be followed any further."""

    def mask(self) -> Integers32:
        """Return the tokens that are allowed next: int32 [ceil(vocab / 32)]."""

    def consume(self, token: int) -> None:
        """Advance by a token of the output."""


def mask_without(tokens: Iterable[int], vocab: int) -> Integers32:
    """Return the mask of all tokens except these: int32 [ceil(vocab / 32)]."""
    words = np.full(-(-vocab // 32), -1, dtype=np.int32)
    for token in tokens:
        words.view(np.uint32)[token // 32] &= ~np.uint32(1 << token % 32)
    return words
