"""Order: which waiting sequence comes first, by a key."""

from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Protocol

from xcore.batching.sequence import Sequence
from xcore.batching.step import Step

if TYPE_CHECKING:
    from xcore.batching.ledger import Ledger


class Order(Protocol):
    """Decides which waiting sequence comes first."""

    changes: bool
    """Whether any key may change at any time. If so, all keys are computed again at every new moment."""

    def key(self, sequence: Sequence, now: float) -> object:
        """Return the sorting key: lower is earlier; sequences with equal keys come in the order of their indices."""


class FollowingOrder:
    """A stateful order: it receives the sequences' events, and reports the sequences whose keys have changed.

    Each ledger uses an order of its own: `fresh`. Times are in seconds since the run began.
    """

    changes = False
    grouped = False
    """Whether `group_key` is compared before `key`."""

    def fresh(self) -> "FollowingOrder":
        """Return the same order without any history."""
        raise NotImplementedError

    def attach(self, ledger: "Ledger") -> None:
        """Learn the ledger whose sequences it follows, before any of them."""

    def key(self, sequence: Sequence, now: float) -> object:
        """Return the key as `Order.key`; it is constant while a sequence waits, unless `due` returns the sequence."""
        raise NotImplementedError

    def group(self, sequence: Sequence) -> Hashable:
        """Return the group that a sequence waits in; constant while it waits, unless `due` returns the sequence."""
        return None

    def group_key(self, group: Hashable) -> object:
        """Return a group's key: lower is earlier; while a group has waiting sequences, its key may only rise."""
        return 0

    def due(self, now: float) -> Iterable[Sequence]:
        """Return the waiting sequences whose keys have changed since the last call."""
        return ()

    def wait(self, sequence: Sequence, now: float) -> None:
        """Process the arrival of a sequence, or its return to the queue."""

    def start(self, sequence: Sequence, now: float) -> None:
        """Process the admission of a sequence."""

    def stop(self, sequence: Sequence, now: float) -> None:
        """Process the preemption of a sequence."""

    def book(self, step: Step, iterations: int) -> None:
        """Process the booking of a step, whose decoding counts `iterations` times."""

    def ran(self, step: Step, seconds: float, now: float) -> None:
        """Process the end of a step that took `seconds`, on devices that several models share.

        On shared devices, the time of residence is not the time of computing.
        """

    def end(self, sequence: Sequence) -> None:
        """Process the end of a sequence, which waits no more."""
