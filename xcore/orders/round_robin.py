"""Round robin: services (or clients) in turn, one request each."""

from collections.abc import Hashable

from xcore.batching import FollowingOrder, Sequence, Status


class RoundRobin(FollowingOrder):
    """Orders requests by turns: a request gets the turn after its service's last turn, but never a past one."""

    def __init__(self) -> None:
        self._turn = 0
        """The latest turn in which a request was admitted."""
        self._last: dict[Hashable, int] = {}
        self._turns: dict[int, int] = {}
        """Turns of waiting sequences, by index."""

    def fresh(self) -> "RoundRobin":
        """Return the same order without any history."""
        return RoundRobin()

    def wait(self, sequence: Sequence, now: float) -> None:
        """Assign a turn; a preempted sequence has used its turn, and gets the present one."""
        if sequence.status is Status.PREEMPTED:
            self._turns[sequence.index] = self._turn
            return
        group = (sequence.hints.service, sequence.hints.client)
        turn = max(self._turn, self._last.get(group, -1) + 1)
        self._last[group] = self._turns[sequence.index] = turn

    def start(self, sequence: Sequence, now: float) -> None:
        """Make the sequence's turn the latest."""
        self._turn = max(self._turn, self._turns.pop(sequence.index, 0))

    def end(self, sequence: Sequence) -> None:
        """Forget the sequence's turn."""
        self._turns.pop(sequence.index, None)

    def key(self, sequence: Sequence, now: float) -> tuple[int, float, int]:
        """Return the sorting key: its turn, then its arrival."""
        return self._turns.get(sequence.index, 0), sequence.arrival_s, sequence.index
