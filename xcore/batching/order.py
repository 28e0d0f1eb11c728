"""Order: which waiting sequence comes first, by a key."""

from collections.abc import Hashable, Iterable
from typing import Any, Protocol

from xcore.batching.sequence import Sequence
from xcore.batching.step import Step


class Order(Protocol):
    """Which waiting sequence comes first."""

    changes: bool
    """Whether any key may change at any time: all are then computed again at every new moment."""

    def key(self, sequence: Sequence, now: float) -> Any:
        """Lower is earlier; sequences with equal keys come in the order of their indices."""


class FollowingOrder:
    """An order that follows what happens to sequences, and says itself whose keys have changed. Each ledger follows by
    an order of its own: `fresh`. Moments in seconds since the run began.
    """

    changes = False
    grouped = False
    """Whether `group_key` comes before `key`."""

    def fresh(self) -> "FollowingOrder":
        """The same order, before anything has happened."""
        raise NotImplementedError

    def key(self, sequence: Sequence, now: float) -> Any:
        """As `Order.key`; constant while a sequence waits, unless `due` returns it."""
        raise NotImplementedError

    def group(self, sequence: Sequence) -> Hashable:
        """Whom a sequence waits with; constant while it waits, unless `due` returns it."""
        return None

    def group_key(self, group: Hashable) -> Any:
        """Groups with lower keys come first; while a group has waiting sequences its key may only rise."""
        return 0

    def due(self, now: float) -> Iterable[Sequence]:
        """Waiting sequences whose keys have changed since the last call."""
        return ()

    def wait(self, sequence: Sequence, now: float) -> None:
        """It has arrived, or waits again."""

    def start(self, sequence: Sequence, now: float) -> None:
        """It has become resident."""

    def stop(self, sequence: Sequence, now: float) -> None:
        """It was preempted."""

    def book(self, step: Step, iterations: int) -> None:
        """A step is booked, its decoding so many times."""

    def ran(self, step: Step, seconds: float, now: float) -> None:
        """A step has taken so long, ending now: on devices that several models share, where residence says little."""

    def end(self, sequence: Sequence) -> None:
        """It has ended, and waits no more."""
