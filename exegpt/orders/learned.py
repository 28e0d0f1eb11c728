"""Shortest first by a ranker's score (vLLM-LTR): only which of two is shorter need be right."""

from exegpt.batching import Sequence


class Learned:
    """By score, the highest first; what a sequence has generated changes nothing, as in vLLM-LTR."""

    changes = False

    def key(self, sequence: Sequence, now: float) -> tuple[float, float, int]:
        """A constant."""
        return -(sequence.hints.score or 0.0), sequence.arrival_s, sequence.index
