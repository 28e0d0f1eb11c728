"""Token masks: which tokens of the vocabulary may come, a bit each, as `LogitEdits.allowed` has them."""

from collections.abc import Iterable
from typing import Protocol

import numpy as np


class Constraint(Protocol):
    """What a sequence's output must keep to, as far as its tokens have come."""

    @property
    def complete(self) -> bool:
        """Whether nothing can follow."""

    @property
    def failed(self) -> bool:
        """Whether that is because it can't be followed."""

    def mask(self) -> np.ndarray:
        """The tokens that may come next: int32 [ceil(vocab / 32)]."""

    def consume(self, token: int) -> None:
        """Go on by a token of the output."""


def mask_without(tokens: Iterable[int], vocab: int) -> np.ndarray:
    """The mask of all tokens but these: int32 [ceil(vocab / 32)]."""
    words = np.full(-(-vocab // 32), -1, dtype=np.int32)
    for token in tokens:
        words.view(np.uint32)[token // 32] &= ~np.uint32(1 << token % 32)
    return words
