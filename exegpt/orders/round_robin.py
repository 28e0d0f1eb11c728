"""Round robin: services (or clients) in turn, one request each."""

from collections.abc import Hashable

from exegpt.batching import FollowingOrder, Sequence, Status


class RoundRobin(FollowingOrder):
    """By turns, which requests get as they begin to wait: the one after their service's last, and never one that has
    passed.
    """

    def __init__(self) -> None:
        self._turn = 0
        """The latest that a request was admitted in."""
        self._last: dict[Hashable, int] = {}
        self._turns: dict[int, int] = {}
        """Of waiting sequences, by index."""

    def fresh(self) -> "RoundRobin":
        """Nobody has had a turn."""
        return RoundRobin()

    def wait(self, sequence: Sequence, now: float) -> None:
        """Draw a turn; a preempted one had its own, and waits for the one that is on."""
        if sequence.status is Status.PREEMPTED:
            self._turns[sequence.index] = self._turn
            return
        group = (sequence.hints.service, sequence.hints.client)
        turn = max(self._turn, self._last.get(group, -1) + 1)
        self._last[group] = self._turns[sequence.index] = turn

    def start(self, sequence: Sequence, now: float) -> None:
        """Its turn is the latest."""
        self._turn = max(self._turn, self._turns.pop(sequence.index, 0))

    def end(self, sequence: Sequence) -> None:
        """Forget its turn."""
        self._turns.pop(sequence.index, None)

    def key(self, sequence: Sequence, now: float) -> tuple[int, float, int]:
        """Its turn, then its arrival."""
        return self._turns.get(sequence.index, 0), sequence.arrival_s, sequence.index
