"""The learned order over several models: scores of different rankers, compared as lengths (vLLM-LTR)."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence as Items
from math import inf

import numpy as np

from xcore.batching import Sequence
from xcore.errors import InputError
from xcore.specs.workload import LengthDistribution


class ScoredLength:
    """Orders one model's sequences by score, the highest first, with keys that are comparable between models.

    Rankers have no common scale. So a score is replaced by its place among the `reference` scores of its model, from 0
    (lowest) to 1 (highest), and the place p by the (1 - p) quantile of the model's output lengths. Keys compare these
    lengths, then the places. Neither changes under any increasing change of a model's scores and its reference.
    """

    changes = False

    def __init__(self, model: str, reference: Items[float], outputs: LengthDistribution):
        """Create the order of one model; InputError without reference scores.

        Args:
            model: Name of the model; separates models whose requests are otherwise equal.
            reference: Scores of prompts like those that will come.
            outputs: The model's output lengths in tokens.
        """
        if not len(reference):
            raise InputError(
                f"The learned order of model '{model}' has no scores to compare with: it needs at least 1."
            )
        self._model = model
        self._reference = sorted(map(float, reference))
        ranks = np.arange(2 * len(reference) + 1) / (2 * len(reference))
        places = np.searchsorted(np.cumsum(outputs.p), 1.0 - ranks - 1e-12)  # as `LengthDistribution.quantile`
        found: list[int] = np.minimum(places, len(outputs.lengths) - 1).tolist()
        self._lengths = [outputs.lengths[place] for place in found]
        """The length at each rank."""

    def _rank(self, score: float) -> int:
        """Return how many reference scores are below a score, plus how many are at most as high.

        Equal scores count half, so a score that all prompts have is in the middle.
        """
        return bisect_left(self._reference, score) + bisect_right(self._reference, score)

    def length(self, score: float) -> int:
        """Return the output length in tokens that a score stands for."""
        return self._lengths[self._rank(score)]

    def key(self, sequence: Sequence, now: float) -> tuple[int, float, str, float, float, int]:
        """Return the sorting key, a constant."""
        score = sequence.hints.score or 0.0
        rank = self._rank(score)
        place = -rank / (2 * len(self._reference))
        return self._lengths[rank], place, self._model, -score, sequence.arrival_s, sequence.index

    def steady_s(self, sequence: Sequence, now: float) -> float:
        """Return how long the key of a running sequence won't rise: it is constant."""
        return inf
