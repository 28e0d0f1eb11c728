"""vLLM-LTR's starvation guard around any order: nobody is passed over for ever."""

from collections import deque
from collections.abc import Hashable, Iterable
from typing import Any

from exegpt.batching import FollowingOrder, Order, Sequence, Step

PROMOTED = "promoted"
"""The group of promoted sequences, before all others."""


class StarvationGuard(FollowingOrder):
    """Promotes a sequence that no step had in it for `idle_steps` in a row; after `quantum` steps it is an ordinary one
    again.

    Promoted sequences come in the order in which they were promoted, and not, as in vLLM-LTR, by score: under lasting
    overload the short ones are promoted too, and would go on overtaking the long.
    """

    grouped = True

    def __init__(self, order: Order, idle_steps: int = 200, quantum: int = 10):
        self.order, self.idle_steps, self.quantum = order, idle_steps, quantum
        self._inner = order if isinstance(order, FollowingOrder) else None
        self.changes = order.changes
        self._steps = 0
        """Booked so far."""
        self._promotions = 0
        self._idle: deque[tuple[int, Sequence]] = deque()
        """Since which step waiting sequences are idle, oldest first; those that left meanwhile are passed over."""
        self._since: dict[int, int] = {}
        self._promoted: dict[int, int] = {}
        """Indices of promoted sequences, and the places in which they were."""
        self._left: dict[int, int] = {}
        """Of promoted sequences, the steps of their quantum."""

    def fresh(self) -> "StarvationGuard":
        """Nobody has waited."""
        inner = self._inner.fresh() if self._inner else self.order
        return StarvationGuard(inner, self.idle_steps, self.quantum)

    def wait(self, sequence: Sequence, now: float) -> None:
        """It is idle from this step on."""
        self._since[sequence.index] = self._steps
        self._idle.append((self._steps, sequence))
        if self._inner:
            self._inner.wait(sequence, now)

    def due(self, now: float) -> Iterable[Sequence]:
        """The newly promoted, and whoever the inner order names."""
        due = list(self._inner.due(now)) if self._inner else []
        while self._idle and self._idle[0][0] + self.idle_steps <= self._steps:
            since, sequence = self._idle.popleft()
            if self._since.get(sequence.index) == since and sequence.index not in self._promoted:
                self._promotions += 1
                self._promoted[sequence.index], self._left[sequence.index] = self._promotions, self.quantum
                due.append(sequence)
        return due

    def start(self, sequence: Sequence, now: float) -> None:
        """It is idle no more."""
        self._since.pop(sequence.index, None)
        if self._inner:
            self._inner.start(sequence, now)

    def stop(self, sequence: Sequence, now: float) -> None:
        """It may wait again."""
        if self._inner:
            self._inner.stop(sequence, now)

    def book(self, step: Step, iterations: int) -> None:
        """Count steps, and the quanta of those in this one."""
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
        """Pass on how long a step took."""
        if self._inner:
            self._inner.ran(step, seconds, now)

    def _demote(self, sequence: Sequence) -> None:
        self._left.pop(sequence.index, None)
        self._promoted.pop(sequence.index, None)

    def end(self, sequence: Sequence) -> None:
        """Forget it."""
        self._since.pop(sequence.index, None)
        self._demote(sequence)
        if self._inner:
            self._inner.end(sequence)

    def group(self, sequence: Sequence) -> Hashable:
        """Promoted sequences are a group; the others as in the inner order."""
        if sequence.index in self._promoted:
            return PROMOTED
        return ("ordinary", self._inner.group(sequence) if self._inner else None)

    def group_key(self, group: Hashable) -> tuple[Any, ...]:
        """The promoted come first."""
        if group == PROMOTED:
            return (0,)
        assert isinstance(group, tuple)
        return (1, self._inner.group_key(group[1]) if self._inner and self._inner.grouped else 0)

    def key(self, sequence: Sequence, now: float) -> Any:
        """Of a promoted one its place, else as in the inner order."""
        place = self._promoted.get(sequence.index)
        return (place,) if place is not None else self.order.key(sequence, now)
