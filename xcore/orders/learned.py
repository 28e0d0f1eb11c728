"""Shortest first by a ranker's score (vLLM-LTR): only the comparison of two lengths has to be right."""

from xcore.batching import Sequence


class Learned:
    """Orders sequences by score, the highest first; generated tokens change nothing, as in vLLM-LTR."""

    changes = False

    def key(self, sequence: Sequence, now: float) -> tuple[float, float, int]:
        """Return the sorting key, a constant."""
        return -(sequence.hints.score or 0.0), sequence.arrival_s, sequence.index
