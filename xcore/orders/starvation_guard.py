"""vLLM-LTR's starvation guard around any order: no request is passed over for ever."""

from collections import deque
from collections.abc import Hashable, Iterable

from xcore.batching import FollowingOrder, Ledger, Order, Sequence, Step

PROMOTED = "promoted"
"""The group of promoted sequences, before all others."""


class StarvationGuard(FollowingOrder):
    """Promotes a sequence after `idle_steps` consecutive steps without it, until it has run for `quantum` steps.

    Promoted sequences come in the order of their promotion, not by score as in vLLM-LTR: under lasting overload short
    sequences are promoted too, and would keep overtaking long ones.
    """

    grouped = True

    def __init__(self, order: Order, idle_steps: int = 200, quantum: int = 10):
        self.order, self.idle_steps, self.quantum = order, idle_steps, quantum
        self._inner = order if isinstance(order, FollowingOrder) else None
        self.changes = order.changes
        self._steps = 0
        """Number of steps so far."""
        self._promotions = 0
        self._idle: deque[tuple[int, Sequence]] = deque()
        """The steps since which waiting sequences are idle, oldest first; entries of sequences that left meanwhile are
        skipped.
        """
        self._since: dict[int, int] = {}
        self._promoted: dict[int, int] = {}
        """Promotion numbers of promoted sequences, by index."""
        self._left: dict[int, int] = {}
        """Remaining steps of the quantum of promoted sequences."""

    def fresh(self) -> "StarvationGuard":
        """Return the same order without any history."""
        inner = self._inner.fresh() if self._inner else self.order
        return StarvationGuard(inner, self.idle_steps, self.quantum)

    def attach(self, ledger: Ledger) -> None:
        """Report the ledger to the inner order."""
        if self._inner:
            self._inner.attach(ledger)

    def wait(self, sequence: Sequence, now: float) -> None:
        """Count the sequence as idle from this step on."""
        self._since[sequence.index] = self._steps
        self._idle.append((self._steps, sequence))
        if self._inner:
            self._inner.wait(sequence, now)

    def due(self, now: float) -> Iterable[Sequence]:
        """Return the newly promoted sequences, and those that the inner order reports."""
        due = list(self._inner.due(now)) if self._inner else []
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
        if self._inner:
            self._inner.start(sequence, now)

    def stop(self, sequence: Sequence, now: float) -> None:
        """Record that the sequence stops running; it may wait again."""
        if self._inner:
            self._inner.stop(sequence, now)

    def book(self, step: Step, iterations: int) -> None:
        """Count the step, and subtract it from the quanta of its sequences."""
        self._steps += iterations
        if self._inner:
            self._inner.book(step, iterations)
        if self._left:
            for sequence in (*(s for s, _ in step.encode), *step.decode):
                if sequence.index in self._left:
                    self._left[sequence.index] -= iterations
                    if self._left[sequence.index] <= 0:
                        self._demote(sequence)

    def ran(self, step: Step, seconds: float, now: float) -> None:
        """Report a step's duration to the inner order."""
        if self._inner:
            self._inner.ran(step, seconds, now)

    def _demote(self, sequence: Sequence) -> None:
        self._left.pop(sequence.index, None)
        self._promoted.pop(sequence.index, None)

    def end(self, sequence: Sequence) -> None:
        """Forget the sequence."""
        self._since.pop(sequence.index, None)
        self._demote(sequence)
        if self._inner:
            self._inner.end(sequence)

    def group(self, sequence: Sequence) -> Hashable:
        """Return the group: all promoted sequences form one; other sequences have the group of the inner order."""
        if sequence.index in self._promoted:
            return PROMOTED
        return ("ordinary", self._inner.group(sequence) if self._inner else None)

    def group_key(self, group: Hashable) -> tuple[object, ...]:
        """Return the group's key: promoted sequences come first."""
        if group == PROMOTED:
            return (0,)
        assert isinstance(group, tuple)
        return (1, self._inner.group_key(group[1]) if self._inner and self._inner.grouped else 0)

    def key(self, sequence: Sequence, now: float) -> object:
        """Return the promotion number of a promoted sequence, else the key of the inner order."""
        place = self._promoted.get(sequence.index)
        return (place,) if place is not None else self.order.key(sequence, now)
