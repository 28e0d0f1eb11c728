"""Promoting: an order in which some waiting sequences, the promoted ones, come before all others."""

from collections.abc import Hashable

from xcore.batching import Order, Sequence
from xcore.orders.order_wrapper import OrderWrapper

PROMOTED = "promoted"
"""The group of promoted sequences, before all others."""


class Promoting(OrderWrapper):
    """Ranks promoted sequences before all others, which the inner order ranks.

    A subclass decides which sequences are promoted, and their places among each other.
    """

    def __init__(self, order: Order):
        super().__init__(order)
        self.grouped = True
        self._promoted: dict[int, int] = {}
        """Places of promoted sequences among each other, by index."""

    def end(self, sequence: Sequence) -> None:
        """Forget the sequence."""
        self._promoted.pop(sequence.index, None)
        super().end(sequence)

    def group(self, sequence: Sequence) -> Hashable:
        """Return the group: all promoted sequences form one; other sequences have the group of the inner order."""
        return PROMOTED if sequence.index in self._promoted else ("ordinary", super().group(sequence))

    def group_key(self, group: Hashable) -> tuple[object, ...]:
        """Return the group's key: promoted sequences come first."""
        if group == PROMOTED:
            return (0,)
        assert isinstance(group, tuple)
        return (1, super().group_key(group[1]) if self._inner.grouped else 0)

    def key(self, sequence: Sequence, now: float) -> object:
        """Return the place of a promoted sequence, else the key of the inner order."""
        place = self._promoted.get(sequence.index)
        return (place,) if place is not None else super().key(sequence, now)
