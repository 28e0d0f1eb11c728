"""Skip-join multi-level feedback queues (FastServe).

A request joins the level whose quantum holds its prefill, and drops a level with each quantum that it has used.
"""

from xcore.batching import FollowingOrder, Sequence, Step
from xcore.orders.attained import Attained


class SkipJoinMLFQ(FollowingOrder):
    """Orders sequences by level, and within a level by arrival.

    Level i has a quantum of `quantum_s` * 2^i seconds of residence or, if `executed`, of the steps that contained the
    sequence.
    """

    def __init__(self, quantum_s: float = 0.01, executed: bool = False):
        self.quantum_s = quantum_s
        """Quantum of level 0 in seconds; 10 ms as in vLLM-LTR's MLFQ."""
        self._attained = Attained(executed)

    def fresh(self) -> "SkipJoinMLFQ":
        """Return the same order without any history."""
        return SkipJoinMLFQ(self.quantum_s, self._attained.executed)

    def start(self, sequence: Sequence, now: float) -> None:
        """Record that the sequence starts to use its quantum."""
        self._attained.start(sequence, now)

    def stop(self, sequence: Sequence, now: float) -> None:
        """Record that the sequence stops using its quantum."""
        self._attained.stop(sequence, now)

    def ran(self, step: Step, seconds: float, now: float) -> None:
        """Subtract a step's seconds from the quanta of its sequences."""
        if self._attained.executed:
            for sequence in (*(s for s, _ in step.encode), *step.decode):
                self._attained.add(sequence, seconds)

    def end(self, sequence: Sequence) -> None:
        """Forget the sequence."""
        self._attained.end(sequence)

    def level(self, sequence: Sequence) -> int:
        """Return the level of a waiting sequence; if steps count, also of a running one."""
        return self._level(sequence)[0]

    def steady_s(self, sequence: Sequence, now: float) -> float:
        """Return how long a running sequence stays on its level."""
        return self._level(sequence)[1]

    def _level(self, sequence: Sequence) -> tuple[int, float]:
        """Return a sequence's level, and what remains of its quantum there."""
        level, quantum = 0, self.quantum_s
        while quantum < (sequence.hints.prefill_s or 0.0):
            level, quantum = level + 1, 2 * quantum
        used = self._attained.seconds(sequence)
        while used >= quantum:
            level, used, quantum = level + 1, used - quantum, 2 * quantum
        return level, quantum - used

    def key(self, sequence: Sequence, now: float) -> tuple[int, float, int]:
        """Return the sorting key, constant while a sequence waits."""
        return self.level(sequence), sequence.arrival_s, sequence.index
