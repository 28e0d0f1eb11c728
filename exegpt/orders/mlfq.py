"""Skip-join multi-level feedback queues (FastServe): a request joins the level whose quantum holds its prefill, and
falls a level with each quantum that it has used.
"""

from exegpt.batching import FollowingOrder, Sequence
from exegpt.orders.attained import Attained


class SkipJoinMLFQ(FollowingOrder):
    """By level; within a level by arrival. Level i has a quantum of `quantum_s` * 2^i seconds."""

    def __init__(self, quantum_s: float = 0.01):
        self.quantum_s = quantum_s
        """vLLM-LTR's MLFQ runs at 10 ms."""
        self._attained = Attained()

    def fresh(self) -> "SkipJoinMLFQ":
        """Nobody has run."""
        return SkipJoinMLFQ(self.quantum_s)

    def start(self, sequence: Sequence, now: float) -> None:
        """It uses its quantum."""
        self._attained.start(sequence, now)

    def stop(self, sequence: Sequence, now: float) -> None:
        """It uses it no more."""
        self._attained.stop(sequence, now)

    def end(self, sequence: Sequence) -> None:
        """Forget it."""
        self._attained.end(sequence)

    def level(self, sequence: Sequence) -> int:
        """Of a waiting sequence."""
        level, quantum = 0, self.quantum_s
        while quantum < (sequence.hints.prefill_s or 0.0):
            level, quantum = level + 1, 2 * quantum
        used = self._attained.seconds(sequence)
        while used >= quantum:
            level, used, quantum = level + 1, used - quantum, 2 * quantum
        return level

    def key(self, sequence: Sequence, now: float) -> tuple[int, float, int]:
        """Constant while it waits."""
        return self.level(sequence), sequence.arrival_s, sequence.index
