"""vLLM-LTR's starvation guard around any order: no request is passed over for ever."""

from collections import deque
from collections.abc import Iterable

from xcore.batching import Order, Sequence, Step
from xcore.orders.promoting import Promoting


class StarvationGuard(Promoting):
    """Promotes a sequence after `idle_steps` consecutive steps without it, until it has run for `quantum` steps.

    Promoted sequences come in the order of their promotion, not by score as in vLLM-LTR: under lasting overload short
    sequences are promoted too, and would keep overtaking long ones.
    """

    def __init__(self, order: Order, idle_steps: int = 200, quantum: int = 10):
        super().__init__(order)
        self.idle_steps, self.quantum = idle_steps, quantum
        self._steps = 0
        """Number of steps so far."""
        self._promotions = 0
        self._idle: deque[tuple[int, Sequence]] = deque()
        """The steps since which waiting sequences are idle, oldest first; entries of sequences that left meanwhile are
        skipped.
        """
        self._since: dict[int, int] = {}
        self._left: dict[int, int] = {}
        """Remaining steps of the quantum of promoted sequences."""

    def fresh(self) -> "StarvationGuard":
        """Return the same order without any history."""
        return StarvationGuard(self._fresh_inner(), self.idle_steps, self.quantum)

    def wait(self, sequence: Sequence, now: float) -> None:
        """Count the sequence as idle from this step on."""
        self._since[sequence.index] = self._steps
        self._idle.append((self._steps, sequence))
        super().wait(sequence, now)

    def due(self, now: float) -> Iterable[Sequence]:
        """Return the newly promoted sequences, and the sequences whose keys have changed in the inner order."""
        due = list(super().due(now))
        while self._idle and self._idle[0][0] + self.idle_steps <= self._steps:
            since, sequence = self._idle.popleft()
            if self._since.get(sequence.index) == since and sequence.index not in self._promoted:
                self._promotions += 1
                self._promoted[sequence.index], self._left[sequence.index] = self._promotions, self.quantum
                due.append(sequence)
        return due

    def start(self, sequence: Sequence, now: float) -> None:
        """Stop counting the sequence as idle."""
        self._since.pop(sequence.index, None)
        super().start(sequence, now)

    def book(self, step: Step, iterations: int) -> None:
        """Count the step, and subtract it from the quanta of its sequences."""
        self._steps += iterations
        super().book(step, iterations)
        if self._left:
            for sequence in (*(s for s, _ in step.encode), *step.decode):
                if sequence.index in self._left:
                    self._left[sequence.index] -= iterations
                    if self._left[sequence.index] <= 0:
                        self._demote(sequence)

    def _demote(self, sequence: Sequence) -> None:
        self._left.pop(sequence.index, None)
        self._promoted.pop(sequence.index, None)

    def end(self, sequence: Sequence) -> None:
        """Forget the sequence."""
        self._since.pop(sequence.index, None)
        self._demote(sequence)
        super().end(sequence)
