"""Token masks: which tokens of the vocabulary may come, a bit each, as `LogitEdits.allowed` has them."""

from collections.abc import Iterable

import numpy as np


def mask_without(tokens: Iterable[int], vocab: int) -> np.ndarray:
    """The mask of all tokens but these: int32 [ceil(vocab / 32)]."""
    words = np.full(-(-vocab // 32), -1, dtype=np.int32)
    for token in tokens:
        words.view(np.uint32)[token // 32] &= ~np.uint32(1 << token % 32)
    return words
