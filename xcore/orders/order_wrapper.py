"""OrderWrapper: the base of orders around another order."""

from collections.abc import Hashable, Iterable

from xcore.batching import FollowingOrder, Ledger, Order, Sequence, Step


class OrderWrapper(FollowingOrder):
    """Ranks sequences as the inner order does, and reports all events to it; a subclass extends single methods."""

    def __init__(self, order: Order):
        self.order = order
        self._inner = order if isinstance(order, FollowingOrder) else FollowingOrder()
        """The receiver of events. For an order without a state, it ignores them."""
        self.changes, self.grouped = order.changes, self._inner.grouped

    def _fresh_inner(self) -> Order:
        """Return the inner order without any history."""
        return self.order.fresh() if isinstance(self.order, FollowingOrder) else self.order

    def attach(self, ledger: Ledger) -> None:
        """Report the ledger to the inner order."""
        self._inner.attach(ledger)

    def wait(self, sequence: Sequence, now: float) -> None:
        """Report a waiting sequence to the inner order."""
        self._inner.wait(sequence, now)

    def due(self, now: float) -> Iterable[Sequence]:
        """Return the sequences whose keys have changed in the inner order."""
        return self._inner.due(now)

    def start(self, sequence: Sequence, now: float) -> None:
        """Report an admission to the inner order."""
        self._inner.start(sequence, now)

    def stop(self, sequence: Sequence, now: float) -> None:
        """Report a preemption to the inner order."""
        self._inner.stop(sequence, now)

    def book(self, step: Step, iterations: int) -> None:
        """Report a step to the inner order."""
        self._inner.book(step, iterations)

    def ran(self, step: Step, seconds: float, now: float) -> None:
        """Report a step's duration to the inner order."""
        self._inner.ran(step, seconds, now)

    def end(self, sequence: Sequence) -> None:
        """Report the end of a sequence to the inner order."""
        self._inner.end(sequence)

    def group(self, sequence: Sequence) -> Hashable:
        """Return the inner order's group."""
        return self._inner.group(sequence)

    def group_key(self, group: Hashable) -> object:
        """Return the inner order's key of a group."""
        return self._inner.group_key(group)

    def key(self, sequence: Sequence, now: float) -> object:
        """Return the inner order's key."""
        return self.order.key(sequence, now)
