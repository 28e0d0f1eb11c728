"""Scores of several models' rankers on one scale."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ScoreScale:
    """A model's scores and output lengths, each ascending: lengths compare across models, scores don't."""

    scores: tuple[float, ...]
    lengths: tuple[int, ...]

    @staticmethod
    def of(scores: Iterable[float], lengths: Iterable[int]) -> "ScoreScale":
        """The scale of a model's past requests, in any order."""
        return ScoreScale(tuple(sorted(scores)), tuple(sorted(lengths)))

    def length(self, score: float) -> int:
        """The output length at the score's quantile, counted from the longest: a higher score is a shorter output."""
        share = (bisect_left(self.scores, score) + bisect_right(self.scores, score)) / (2 * len(self.scores))
        return self.lengths[min(int((1 - share) * len(self.lengths)), len(self.lengths) - 1)]

    def score(self, score: float) -> float:
        """The score to compare with other models': minus the length."""
        return -float(self.length(score))
