"""Features of a prompt: hashed words and pairs of words, its first words, and its length."""

import itertools
import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BUCKETS = 1 << 15
"""Hashed features: far more than the distinct informative ones in a few thousand prompts."""
MOST_WORDS = 256
"""Words of a prompt that are read, from each of its ends."""
DENSE = 4
"""Number of numeric features."""
_WORD = re.compile(r"[a-z]+|\d+|[^\sa-z\d]")


@dataclass(frozen=True)
class Features:
    """Features of prompts.

    Prompt i has the buckets from `starts[i]` to the next start, each once, and row i of `dense` [n, DENSE].
    """

    buckets: NDArray[np.int64]
    starts: NDArray[np.int64]
    """[n + 1]"""
    dense: NDArray[np.float32]

    @staticmethod
    def of(prompts: Sequence[str]) -> "Features":
        """Return the features of texts, in their order."""
        buckets = [_buckets(prompt) for prompt in prompts]
        starts = np.cumsum([0, *map(len, buckets)])
        flat = np.array([bucket for own in buckets for bucket in own], dtype=np.int64)
        dense = np.array([_dense(prompt) for prompt in prompts], dtype=np.float32).reshape(-1, DENSE)
        return Features(flat, starts, dense)

    def __len__(self) -> int:
        return len(self.dense)

    def rows(self, indices: NDArray[np.int64]) -> "Features":
        """Return the features of some of the prompts."""
        parts = [self.buckets[self.starts[i] : self.starts[i + 1]] for i in indices]
        starts = np.cumsum([0, *map(len, parts)])
        flat = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        return Features(flat, starts, self.dense[indices])


def _buckets(prompt: str) -> list[int]:
    words = _WORD.findall(prompt.lower())
    if len(words) > 2 * MOST_WORDS:
        words = [*words[:MOST_WORDS], *words[-MOST_WORDS:]]
    grams = {*words, *(f"{a} {b}" for a, b in itertools.pairwise(words))}
    grams |= {f"^{' '.join(words[:n])}" for n in (1, 2, 3)}
    return sorted({zlib.crc32(gram.encode()) % BUCKETS for gram in grams})


def _dense(prompt: str) -> tuple[float, ...]:
    """Return a prompt's lengths on a logarithmic scale, about 0 to 1."""
    lines, words = prompt.count("\n"), len(prompt.split())
    marks = sum(not (c.isalnum() or c.isspace()) for c in prompt)
    return tuple(math.log1p(value) / 8 for value in (len(prompt), words, lines, marks))
