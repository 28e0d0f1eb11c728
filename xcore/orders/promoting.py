"""Promoting: an order in which some waiting sequences, the promoted ones, come before all others."""

from collections.abc import Hashable, Iterable

from xcore.batching import FollowingOrder, Ledger, Order, Sequence, Step

PROMOTED = "promoted"
"""The group of promoted sequences, before all others."""


class Promoting(FollowingOrder):
    """Reports all events to an inner order, which ranks the sequences that aren't promoted.

    A subclass decides which ones are promoted, and their places among each other.
    """

    grouped = True

    def __init__(self, order: Order):
        self.order = order
        self._inner = order if isinstance(order, FollowingOrder) else None
        self.changes = order.changes
        self._promoted: dict[int, int] = {}
        """Places of promoted sequences among each other, by index."""

    def _fresh_inner(self) -> Order:
        """Return the inner order without any history."""
        return self._inner.fresh() if self._inner else self.order

    def attach(self, ledger: Ledger) -> None:
        """Report the ledger to the inner order."""
        if self._inner:
            self._inner.attach(ledger)

    def wait(self, sequence: Sequence, now: float) -> None:
        """Record that the sequence waits."""
        if self._inner:
            self._inner.wait(sequence, now)

    def due(self, now: float) -> Iterable[Sequence]:
        """Return the sequences that the inner order reports."""
        return self._inner.due(now) if self._inner else ()

    def start(self, sequence: Sequence, now: float) -> None:
        """Record that the sequence starts."""
        if self._inner:
            self._inner.start(sequence, now)

    def stop(self, sequence: Sequence, now: float) -> None:
        """Record that the sequence stops running; it may wait again."""
        if self._inner:
            self._inner.stop(sequence, now)

    def book(self, step: Step, iterations: int) -> None:
        """Record the step."""
        if self._inner:
            self._inner.book(step, iterations)

    def ran(self, step: Step, seconds: float, now: float) -> None:
        """Report a step's duration to the inner order."""
        if self._inner:
            self._inner.ran(step, seconds, now)

    def end(self, sequence: Sequence) -> None:
        """Forget the sequence."""
        self._promoted.pop(sequence.index, None)
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
        """Return the place of a promoted sequence, else the key of the inner order."""
        place = self._promoted.get(sequence.index)
        return (place,) if place is not None else self.order.key(sequence, now)
